"""Names, signatures, fields and defaults of the contract, frozen: a script written for it needs no change."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import ValidationError

from upweight import schedulers
from upweight.api_client import APIError, TokenFactory
from upweight.api_client.models import fine_tuning, rl_job
from upweight.examples import basic, grpo, math, utils
from upweight.rollout import runner

EMPTY = inspect.Parameter.empty
CLIENT = TokenFactory("http://127.0.0.1:9", "k")
V1, RL = CLIENT.v1.fine_tuning.jobs, CLIENT.v1alpha1.fine_tuning.jobs
INFERENCE = RL.inference.openai.v1


def keywords(function: Any) -> dict[str, Any]:
    """Keyword-only parameters with their defaults, and what is not keyword-only under its own kind."""
    return {
        name if p.kind is p.KEYWORD_ONLY else f"{p.kind.name.lower()} {name}": None if p.default is EMPTY else p.default
        for name, p in inspect.signature(function).parameters.items()
    }


def required(function: Any) -> set[str]:
    return {name for name, p in inspect.signature(function).parameters.items() if p.default is EMPTY}


@pytest.mark.parametrize(
    ("function", "needed", "optional"),
    [
        (RL.get_runtime_status, "job_id", ""),
        (RL.endpoint, "job_id", ""),
        (RL.bare_endpoint, "", ""),
        (RL.batches.create, "job_id index", ""),
        (RL.batches.get, "job_id batch_index", ""),
        (RL.batches.submit_samples, "job_id batch_index samples", ""),
        (INFERENCE.endpoint, "job_id", ""),
        (INFERENCE.models, "job_id", ""),
        (V1.bare_endpoint, "", ""),
        (
            V1.create,
            "model training_file",
            "ai_project_id from_checkpoint validation_file hyperparameters method integrations seed suffix tags extra_body",
        ),
        (V1.list, "", "limit after ai_project_id"),
        (V1.get, "job_id", ""),
        (V1.cancel, "job_id", ""),
        (V1.get_events, "job_id", "limit after"),
        (V1.checkpoints.list, "job_id", "limit after"),
        (V1.checkpoints.get, "job_id checkpoint_id", ""),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_resource_methods_take_keywords_only(function: Any, needed: str, optional: str) -> None:
    assert keywords(function) == dict.fromkeys([*needed.split(), *optional.split()])
    assert required(function) == set(needed.split())


def test_client_and_error_signatures() -> None:
    parameters = inspect.signature(TokenFactory).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "base_url": None,
        "api_key": None,
        "httpx_client_factory": None,
        "max_retries": 3,
        "tenacity_retry_wait": None,
    }
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["base_url", "api_key"]
    assert keywords(INFERENCE.chat.completions.create) == {"job_id": None, "var_keyword kw": None}
    assert keywords(INFERENCE.completions.create) == {"job_id": None, "var_keyword kw": None}
    error = APIError(msg="why")
    assert (str(error), error.msg, error.response) == ("why", "why", None)


def fields(model: Any) -> dict[str, Any]:
    """Field → default; required ones have none."""
    return {
        name: "required" if f.is_required() else f.get_default(call_default_factory=True)
        for name, f in model.model_fields.items()
    }


R = "required"
CHECKPOINT = dict.fromkeys(
    ["id", "created_at", "fine_tuned_model_checkpoint", "fine_tuning_job_id", "metrics", "object", "step_number"], R
)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (rl_job.CreateBatchRequest, {"index": R}),
        (
            rl_job.JobStatus,
            {"object": "fine_tuning.job.status", "inference_version": R, "total_batches": R, "filled_batches": R},
        ),
        (
            rl_job.Batch,
            {"object": "fine_tuning.batch", "index": R, "status": rl_job.BatchStatus.filling, "sample_count": 0},
        ),
        (
            rl_job.Sample,
            {
                "object": "fine_tuning.rl_sample",
                **dict.fromkeys(
                    ["id", "token_ids", "logprobs", "mask", "normalized_reward", "metadata", "debug_info"], R
                ),
            },
        ),
        (rl_job.UploadSamplesRequest, {"samples": R}),
        (rl_job.ValidationError, {"loc": R, "msg": R, "type": R, "input": None, "ctx": None}),
        (rl_job.HTTPValidationError, {"detail": None}),
        (
            fine_tuning.SupervisedHParameters,
            {
                "batch_size": 8,
                "learning_rate": 1e-5,
                "n_epochs": 3,
                "warmup_ratio": 0.0,
                "weight_decay": 0.0,
                "packing": True,
                "max_grad_norm": 1.0,
                "context_length": 8192,
                "lora": False,
                "lora_r": 8,
                "lora_alpha": 8,
                "lora_dropout": 0.0,
            },
        ),
        (
            fine_tuning.SpecDraftHParameters,
            {
                "batch_size": 8,
                "learning_rate": 0.0075,
                "n_epochs": 1,
                "warmup_ratio": 0.0,
                "weight_decay": 0.0,
                "packing": True,
                "max_grad_norm": 1.0,
                "context_length": 8192,
                "architecture": "eagle3_original",
                "num_decoding_heads": 3,
                "loss": None,
            },
        ),
        (fine_tuning.SpecDraftLossParams, {"type": fine_tuning.Type1.kl}),
        (fine_tuning.WandbConfigRequest, {"project": R, "name": None, "entity": None, "tags": None, "api_key": R}),
        (
            fine_tuning.MlflowConfigRequest,
            {
                "tracking_uri": R,
                "experiment_name": R,
                "run_name": R,
                "tags": None,
                "certificate_file": R,
                "certificate_file_id": None,
                "username": R,
                "password": R,
            },
        ),
        (fine_tuning.HfExportConfigRequest, {"output_repo_name": R, "api_token": R}),
        (fine_tuning.HFCheckpointParametersRequestInput, {"type": "hf", "repo": R, "revision": None, "token": None}),
        (
            fine_tuning.FineTuningJob,
            {
                **dict.fromkeys(["id", "created_at", "model", "status", "training_file"], R),
                "object": "fine_tuning.job",
                "organization_id": "",
                "result_files": [],
                "seed": 0,
                **dict.fromkeys(
                    [
                        "error",
                        "finished_at",
                        "hyperparameters",
                        "method",
                        "integrations",
                        "from_checkpoint",
                        "suffix",
                        "trained_tokens",
                        "validation_file",
                        "estimated_finish",
                        "trained_steps",
                        "total_steps",
                    ]
                ),
            },
        ),
        (
            fine_tuning.FineTuningRequest,
            {
                **dict.fromkeys(["model", "training_file"], R),
                **dict.fromkeys(
                    [
                        "validation_file",
                        "from_checkpoint",
                        "hyperparameters",
                        "method",
                        "integrations",
                        "seed",
                        "suffix",
                    ]
                ),
                "tags": None,
                "extra_body": None,
            },
        ),
        (
            fine_tuning.FineTuningJobEvent,
            {**dict.fromkeys(["id", "created_at", "level", "message", "object"], R), "data": None, "type": None},
        ),
        (fine_tuning.OpenaiTypesFineTuningJobsFineTuningJobCheckpointFineTuningJobCheckpoint, CHECKPOINT),
        (
            fine_tuning.Metrics,
            dict.fromkeys(
                [
                    f"{part}_{what}"
                    for part in ("full_valid", "train", "valid")
                    for what in ("loss", "mean_token_accuracy")
                ]
                + ["step"]
            ),
        ),
        (fine_tuning.FineTuningJobListResponse, {"object": "list", "data": R, "has_more": R}),
        (fine_tuning.ListEventsResponse, {"object": "list", "data": R, "has_more": False}),
        (
            fine_tuning.ListCheckpointsResponse,
            {"object": "list", "data": R, "first_id": None, "last_id": None, "has_more": False},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_model_fields(model: Any, expected: dict[str, Any]) -> None:
    assert fields(model) == expected


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (
            fine_tuning.SupervisedHParameters,
            [
                "batch_size=0",
                "n_epochs=21",
                "warmup_ratio=1.1",
                "context_length=8191",
                "lora_r=129",
                "max_grad_norm=0",
                "lora_alpha=7",
            ],
        ),
        (
            fine_tuning.SpecDraftHParameters,
            ["learning_rate=0", "learning_rate=1", "num_decoding_heads=11", "context_length=131073"],
        ),
    ],
)
def test_ranges(model: Any, changes: list[str]) -> None:
    for change in changes:
        name, value = change.split("=")
        with pytest.raises(ValidationError, match=name):
            model(**{name: float(value)})


def test_members_of_the_schedulers() -> None:
    base = schedulers.BaseRolloutScheduler
    assert inspect.isabstract(base)
    signatures = {
        "set_initial_batch_index": ["batch_index", "n_samples"],
        "set_inference_version": ["v"],
        "rollback_inference_version": ["v"],
        "get_num_rollouts_to_spawn": [],
        "add_tasks": ["tasks"],
        "remove_task": ["task_id"],
        "add_sample_group": ["task_id", "samples"],
        "get_ready_samples": [],
    }
    for name, parameters in signatures.items():
        assert list(inspect.signature(getattr(base, name)).parameters)[1:] == parameters
    for name in ("is_spawning_finished", "is_all_finished", "inference_version", "current_batch_index"):
        assert isinstance(inspect.getattr_static(base, name), property)
    for policy in ("AnyStaleness", "DropStale", "Dropless"):
        assert list(inspect.signature(getattr(schedulers, f"{policy}RolloutScheduler")).parameters) == ["config"]


def test_names_of_runner_and_examples() -> None:
    for name in ("RolloutRunner", "JobStatusTracker", "RolloutDispatcher", "RolloutRunnerInputs"):
        assert hasattr(runner, name)
    for example in (basic, grpo):
        for name in ("Task", "Dataset", "MyConfig", "reward_fn", "roll_out_task", "main", "parse_completion"):
            assert hasattr(example, name), (example.__name__, name)
    for name in (
        "MathDAPODataset MathExampleConfig MathTask build_messages check_answer check_format reward_fn roll_out_task "
        "standard_fewshot_prefix main QUESTION_SUFFIX DEFAULT_DATASET_PATH DEFAULT_DATASET_SPLIT"
    ).split():
        assert hasattr(math, name)
    assert list(inspect.signature(utils.parse_completion).parameters) == ["completion"]
    assert keywords(runner.RolloutRunner.stop) == {"positional_or_keyword self": None}
