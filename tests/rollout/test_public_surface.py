"""Names, signatures and defaults that users rely on."""

import dataclasses
import inspect
import math
import pickle
import re

import pytest
from pydantic import ValidationError

import upweight.rollout as rollout
from tests.rollout import helpers
from upweight.api_client import TokenFactory
from upweight.errors import RolloutError
from upweight.rollout import config, context, dataset, exceptions, models, runner


def test_names():
    assert {
        "DatasetProtocol",
        "ExecutorType",
        "JobInitializationTimeout",
        "RolloutConfig",
        "RolloutContext",
        "RolloutRunner",
        "JobUnavailable",
        "RolloutTimeout",
        "RolloutValidationError",
        "DatasetExhausted",
        "WorkerPoolBroken",
        "RolloutStalled",
        "UploadFailed",
        "BatchSizeMismatch",
    } <= set(rollout.__all__)
    assert config.RolloutConfig is rollout.RolloutConfig
    assert context.RolloutContext is rollout.RolloutContext
    assert dataset.DatasetProtocol is rollout.DatasetProtocol
    assert runner.DEFAULT_QUEUE_GET_TIMEOUT == 0.1
    for error in (
        exceptions.JobInitializationTimeout,
        exceptions.JobUnavailable,
        exceptions.RolloutTimeout,
        exceptions.RolloutValidationError,
        exceptions.DatasetExhausted,
        exceptions.WorkerPoolBroken,
        exceptions.RolloutStalled,
        exceptions.UploadFailed,
        exceptions.BatchSizeMismatch,
    ):
        assert issubclass(error, RolloutError)
    assert issubclass(exceptions.BatchSizeMismatch, ValueError)


def positional(function):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def test_signatures():
    assert positional(runner.RolloutRunner)[:4] == ["api_client", "config", "rollout_fn", "dataset"]
    assert positional(runner.JobStatusTracker) == ["job_id", "api_client", "output_queue", "poll_interval"]
    assert positional(runner.RolloutDispatcher) == [
        "rollout_fn",
        "context",
        "input_queue",
        "output_queue",
        "concurrent_workers",
        "num_rollout_retries",
        "raise_on_rollout_failure",
    ]
    assert positional(context.RolloutContext) == ["config", "api_client"]
    assert inspect.signature(runner.JobStatusTracker).parameters["poll_interval"].default == 1.0
    leading = {
        models.SampleGroup: ["is_rejected", "samples"],
        models.JobStatusUpdate: ["inference_version"],
        models.RolloutException: ["exception", "traceback"],
        models.RolloutResult: ["task", "sample_group"],
    }
    for kind, names in leading.items():
        assert [f.name for f in dataclasses.fields(kind)][: len(names)] == names
        further = dataclasses.fields(kind)[len(names) :]
        assert all(f.default is not dataclasses.MISSING for f in further)
    assert models.SampleGroup() == models.SampleGroup(False, [])
    assert re.fullmatch("task-[0-9a-f]{32}", models.Task(spec=1, starting_inference_version=0).id)
    assert re.fullmatch("sample-[0-9a-f]{32}", helpers.good_sample().id)
    assert (helpers.good_sample().metadata, helpers.good_sample().debug_info) == ({}, {})
    with pytest.raises(TypeError):
        models.Task(1, 0)


def test_config_defaults(monkeypatch):
    made = rollout.RolloutConfig(job_id="j", model_name="m", batch_size=4, num_samples_per_task=2)
    assert made.model_dump() == {
        "job_id": "j",
        "model_name": "m",
        "batch_size": 4,
        "num_samples_per_task": 2,
        "num_batches": None,
        "max_concurrency": 32,
        "executor_type": "thread",
        "allowed_staleness": 0,
        "drop_stale_trajectories": False,
        "num_rollout_retries": 0,
        "raise_on_rollout_failure": False,
        "status_polling_interval": 1.0,
        "job_init_timeout": 600,
        "rollout_timeout": None,
        "rollout_retry_backoff": 0.05,
        "status_failure_timeout": 600,
        "no_progress_timeout": None,
        "max_pool_restarts": 3,
        "process_start_method": "spawn",
        "shutdown_timeout": 5.0,
        "upload_timeout": 600,
        "spool_dir": None,
        "group_log": None,
        "requeue_lost_tasks": 0,
    }
    with pytest.raises(ValidationError, match="typo"):
        rollout.RolloutConfig(**made.model_dump(), typo=1)


@pytest.mark.parametrize("text", ["", "none", "None"])
def test_config_from_the_environment(monkeypatch, text):
    """Failure P2."""
    for name, value in {"JOB_ID": "j", "model_name": "m", "BATCH_SIZE": "4", "NUM_SAMPLES_PER_TASK": "2"}.items():
        monkeypatch.setenv(f"TOKENFACTORY_ROLLOUT_{name}", value)
    monkeypatch.setenv("TOKENFACTORY_ROLLOUT_ALLOWED_STALENESS", text)
    made = rollout.RolloutConfig(batch_size=8)
    assert (made.job_id, made.batch_size, made.allowed_staleness) == ("j", 8, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5, "num_samples_per_task": 2}, "divisible"),
        ({"max_concurrency": 3, "num_samples_per_task": 4}, "max_concurrency 3.*num_samples_per_task 4"),
        ({"allowed_staleness": -2}, "allowed_staleness"),
        ({"num_batches": -1}, "num_batches"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"num_rollout_retries": -1}, "num_rollout_retries"),
        ({"status_polling_interval": -0.1}, "status_polling_interval"),
        ({"status_polling_interval": "often"}, "status_polling_interval"),
        ({"job_id": ""}, "job_id"),
    ],
)
def test_bad_settings_are_refused_by_the_runner(change, message):
    """Failure H6 and all ranges, also of a config that was changed later."""
    settings = helpers.config()
    for name, value in change.items():
        setattr(settings, name, value)
    with TokenFactory("http://127.0.0.1:9", "k") as client, pytest.raises(ValidationError, match=message):
        rollout.RolloutRunner(client, settings, helpers.rollout, helpers.Counting())


TIMES = {
    "status_polling_interval": "from 0 to 3600 seconds",
    "job_init_timeout": "from 0 to 31536000 seconds; None means no limit",
    "rollout_timeout": "above 0 and up to 31536000 seconds; None means no limit",
    "rollout_retry_backoff": "from 0 to 3600 seconds",
    "status_failure_timeout": "from 0 to 31536000 seconds; None means no limit",
    "no_progress_timeout": "above 0 and up to 31536000 seconds; None means no limit",
    "shutdown_timeout": "from 0 to 86400 seconds",
    "upload_timeout": "from 0 to 31536000 seconds",
}


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e12, -1])
@pytest.mark.parametrize("name", TIMES)
def test_times_that_nobody_can_wait_are_refused_with_their_range(name, value):
    """At construction of the config, and by the runner for what was set later."""
    line = re.escape(f"{name} is {value}; it must be {TIMES[name]}")
    with pytest.raises(ValidationError, match=line):
        helpers.config(**{name: value})
    settings = helpers.config()
    setattr(settings, name, value)
    with TokenFactory("http://127.0.0.1:9", "k") as client, pytest.raises(ValidationError, match=line):
        rollout.RolloutRunner(client, settings, helpers.rollout, helpers.Counting())


def test_times_from_the_environment_have_the_same_range(monkeypatch):
    monkeypatch.setenv("TOKENFACTORY_ROLLOUT_UPLOAD_TIMEOUT", "inf")
    with pytest.raises(ValidationError, match="upload_timeout is inf; it must be from 0 to"):
        helpers.config()


def test_places_on_disk_that_cannot_be_used_are_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for spool in (file, file / "below" / "it"):
        line = re.escape(f"spool_dir is {spool}, but {file} is a file; name a folder")
        with pytest.raises(ValidationError, match=line):
            helpers.config(spool_dir=spool)
    with pytest.raises(ValidationError, match=re.escape(f"group_log is {tmp_path}, which is a folder; name a file")):
        helpers.config(group_log=tmp_path)
    with pytest.raises(ValidationError, match=re.escape(f"group_log is {file / 'it'}, but {file} is a file")):
        helpers.config(group_log=file / "it")
    made = helpers.config(spool_dir=tmp_path / "new" / "spool", group_log=tmp_path / "new" / "groups.jsonl")
    assert (made.spool_dir, made.group_log) == (tmp_path / "new" / "spool", tmp_path / "new" / "groups.jsonl")


def test_settings_that_are_changed_as_text_get_their_types(server, api, tmp_path):
    settings = helpers.config()
    settings.executor_type, settings.status_polling_interval, settings.spool_dir = "thread", "0.02", str(tmp_path)
    runner = rollout.RolloutRunner(api, settings, helpers.rollout, helpers.Counting())
    assert runner.run().batches_filled == 3
    assert settings.executor_type is rollout.ExecutorType.THREAD


def test_a_config_of_ones_own_may_be_frozen_and_have_more_fields(server, api):
    class Mine(rollout.RolloutConfig, frozen=True):
        note: str = "mine"

    settings = Mine(**helpers.config().model_dump())
    assert rollout.RolloutRunner(api, settings, helpers.rollout, helpers.Counting()).run().batches_filled == 3


def test_context():
    """Failures C8, W12."""
    with TokenFactory("http://host.example", "secret-key") as client:
        made = rollout.RolloutContext(helpers.config(), client)
        assert made.openai_endpoint == "http://host.example/v1alpha1/fine_tuning/jobs/job-1/inference/openai/v1"
        assert made.openai_client is made.openai_client
        assert str(made.openai_client.base_url).rstrip("/") == made.openai_endpoint
        assert made.openai_client.api_key == "secret-key"
        assert made.async_openai_client() is not made.async_openai_client()
        assert made != rollout.RolloutContext(helpers.config(), client)
        assert {made: 1}[made] == 1
        assert "job-1" in repr(made)
        assert "host.example" in repr(made)
        assert "secret" not in repr(made)
        copy = pickle.loads(pickle.dumps(made))
        assert copy.openai_endpoint == made.openai_endpoint
        made.close()


def test_init_timeout_message():
    error = exceptions.JobInitializationTimeout(job_id="x", timeout_seconds=3)
    assert str(error) == "Rollout job 'x' did not become ready within 3 seconds."
    cause = ValueError("why")
    error = exceptions.JobInitializationTimeout(job_id="x", timeout_seconds=3, last_exception=cause)
    assert str(error).endswith(" Last polling error: why")
    assert error.__cause__ is cause
