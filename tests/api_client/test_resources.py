import subprocess
import sys
import time

import pytest
import tenacity
from pydantic import ValidationError

from tests.fakes import JOB, FakeJobServer, Fault, Reply
from upweight.api_client import APIError, BadRequestError, NotFoundError, TokenFactory
from upweight.api_client import models as reexported
from upweight.api_client.models import fine_tuning, rl_job
from upweight.api_client.resources import V1, V1Alpha1

JOB_BODY = {"id": "ft-1", "created_at": 1, "model": "m", "status": "queued", "training_file": ""}


@pytest.fixture
def server():
    with FakeJobServer(batch_size=2) as fake:
        yield fake


@pytest.fixture
def client(server):
    with TokenFactory(server.url, "k", tenacity_retry_wait=tenacity.wait_none()) as made:
        yield made


def sample(name="s"):
    return rl_job.Sample(
        id=name,
        token_ids=[1, 2],
        logprobs=[0, -1],
        mask=[0, 1],
        normalized_reward=1,
        metadata={},
        debug_info={"a": None},
    )


def test_endpoints(client, server):
    jobs = client.v1alpha1.fine_tuning.jobs
    prefix = f"{server.url}/v1alpha1/fine_tuning/jobs"
    assert isinstance(client.v1, V1)
    assert isinstance(client.v1alpha1, V1Alpha1)
    assert jobs.bare_endpoint() == prefix
    assert jobs.endpoint(job_id="a") == f"{prefix}/a"
    assert jobs.batches.endpoint(job_id="a") == f"{prefix}/a/batches"
    assert jobs.inference.openai.v1.endpoint(job_id="a") == f"{prefix}/a/inference/openai/v1"
    assert client.v1.fine_tuning.jobs.bare_endpoint() == f"{server.url}/v1/fine_tuning/jobs"
    assert (V1.PATH_SEGMENT, V1Alpha1.PATH_SEGMENT) == ("v1", "v1alpha1")
    for other_place in ("", ".", ".."):
        with pytest.raises(ValueError, match="job_id is"):
            jobs.batches.endpoint(job_id=other_place)


def test_rl_job_calls(client, server):
    jobs = client.v1alpha1.fine_tuning.jobs
    with pytest.raises(NotFoundError):
        jobs.batches.get(job_id=JOB, batch_index=0)
    assert jobs.batches.create(job_id=JOB, index=0).sample_count == 0
    batch = jobs.batches.submit_samples(job_id=JOB, batch_index=0, samples=[sample("a"), sample("b")])
    assert (batch.index, batch.status, batch.sample_count) == (0, rl_job.BatchStatus.filled, 2)
    assert server.requests[-1].body["samples"][0] == {
        "object": "fine_tuning.rl_sample",
        "id": "a",
        "token_ids": [1, 2],
        "logprobs": [0.0, -1.0],
        "mask": [0, 1],
        "normalized_reward": 1.0,
        "metadata": {},
        "debug_info": {"a": None},
    }
    status = jobs.get_runtime_status(job_id=JOB)
    assert (status.inference_version, status.total_batches, status.filled_batches) == (1, None, 1)
    jobs.post_metrics(job_id=JOB, batch_index=1, metrics={"score": 0.5})
    assert server.metrics == [{"batch_index": 1, "metrics": {"score": 0.5}}]
    assert jobs.render(job_id=JOB, messages=[{"role": "user", "content": "hi"}])["text"] == "hi"
    assert server.requests[-1].body == {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
    assert jobs.inference.openai.v1.models(job_id=JOB)["data"][0]["id"] == "m"


def test_chat_completion(client):
    chat = client.v1alpha1.fine_tuning.jobs.inference.openai.v1.chat
    answer = chat.completions.create(job_id=JOB, model="m", messages=[], logprobs=True, return_token_ids=True)
    assert answer.choices[0].message.content == "42"
    assert answer.model_extra["prompt_token_ids"] == [11, 12, 13]


def test_create_sends_what_is_given(client, server):
    server.replies["POST", "/v1/fine_tuning/jobs"] = Reply(body={**JOB_BODY, "status": "dreaming", "batch_size": 4})
    method = {"type": "reinforcement", "reinforcement": {"batch_size": 4, "num_batches": None}}
    job = client.v1.fine_tuning.jobs.create(
        model="m", training_file="", method=method, suffix="mine", extra_body={"a": None}, ai_project_id="p"
    )
    assert job.status == "dreaming"
    assert job.model_extra["batch_size"] == 4
    assert server.requests[0].path == "/v1/fine_tuning/jobs?ai_project_id=p"
    assert server.requests[0].body == {
        "model": "m",
        "training_file": "",
        "method": method,
        "suffix": "mine",
        "extra_body": {"a": None},
    }


def test_required_nullable_fields_are_sent_as_null_and_secrets_as_text(client, server):
    """Failure V1."""
    server.replies["POST", "/v1/fine_tuning/jobs"] = Reply(body=JOB_BODY)
    mlflow = {"tracking_uri": "u", "experiment_name": None, "run_name": None, "certificate_file": "c", "username": "n"}
    client.v1.fine_tuning.jobs.create(
        model="m",
        training_file="f",
        integrations=[{"type": "mlflow", "mlflow": {**mlflow, "password": "pw"}}],
        from_checkpoint={"type": "hf", "repo": "r", "token": "t"},
    )
    body = server.requests[0].body
    assert body["integrations"] == [{"type": "mlflow", "mlflow": {**mlflow, "password": "pw"}}]
    assert body["from_checkpoint"] == {"type": "hf", "repo": "r", "token": "t"}
    assert "seed" not in body


def test_job_calls(client, server):
    """Failure V2: a checkpoint without `result_files`."""
    jobs, path = client.v1.fine_tuning.jobs, "/v1/fine_tuning/jobs"
    event = {"id": "e", "created_at": 1, "level": "info", "message": "m", "object": "fine_tuning.job.event"}
    checkpoint = {
        "id": "c",
        "created_at": 1,
        "fine_tuned_model_checkpoint": "x",
        "fine_tuning_job_id": "ft-1",
        "metrics": {"train_loss": 0.5},
        "object": "fine_tuning.job.checkpoint",
        "step_number": 3,
    }
    server.replies |= {
        ("GET", path): Reply(body={"object": "list", "data": [JOB_BODY], "has_more": False}),
        ("GET", f"{path}/ft-1"): Reply(body={**JOB_BODY, "suffix": "s"}),
        ("POST", f"{path}/ft-1/cancel"): Reply(body={**JOB_BODY, "status": "cancelled"}),
        ("GET", f"{path}/ft-1/events"): Reply(body={"data": [event]}),
        ("GET", f"{path}/ft-1/checkpoints"): Reply(body={"data": [checkpoint]}),
        ("GET", f"{path}/ft-1/checkpoints/c"): Reply(body=checkpoint),
    }
    assert jobs.list(limit=2, after="a").data[0].status is fine_tuning.Status.queued
    assert server.requests[-1].path == f"{path}?limit=2&after=a"
    assert jobs.get(job_id="ft-1").suffix == fine_tuning.Suffix(root="s")
    assert jobs.cancel(job_id="ft-1").status is fine_tuning.Status.cancelled
    assert server.requests[-1].raw == b""
    assert jobs.get_events(job_id="ft-1").data[0].level is fine_tuning.Level.info
    assert jobs.checkpoints.list(job_id="ft-1").data[0].result_files == []
    assert jobs.checkpoints.get(job_id="ft-1", checkpoint_id="c").metrics.train_loss == 0.5


def test_pages_are_followed_and_jobs_awaited(client, server):
    jobs, path = client.v1.fine_tuning.jobs, "/v1/fine_tuning/jobs"
    pages = iter(
        [
            {"data": [{**JOB_BODY, "id": "a"}, {**JOB_BODY, "id": "b"}], "has_more": True},
            {"data": [{**JOB_BODY, "id": "c"}], "has_more": False},
        ]
    )
    server.faults = [Fault("/jobs", Reply(body=next(pages))), Fault("/jobs", Reply(body=next(pages)))]
    assert [job.id for job in jobs.iterate()] == ["a", "b", "c"]
    assert [r.path for r in server.requests] == [path, f"{path}?after=b"]
    point = {"id": "c", "created_at": 1, "fine_tuned_model_checkpoint": "x", "fine_tuning_job_id": "ft-1"}
    point |= {"metrics": {}, "object": "fine_tuning.job.checkpoint", "step_number": 3}
    replies = [Reply(body={"data": [{**point, "id": name}], "has_more": name == "c"}) for name in "cd"]
    server.faults = [Fault("/checkpoints", reply) for reply in replies]
    assert [c.id for c in jobs.checkpoints.iterate(job_id="ft-1")] == ["c", "d"]
    server.faults = [Fault("/ft-1", Reply(body=JOB_BODY), times=2)]
    server.replies["GET", f"{path}/ft-1"] = Reply(body={**JOB_BODY, "status": "failed"})
    assert jobs.wait(job_id="ft-1", poll_interval=0.01).status is fine_tuning.Status.failed
    server.replies["GET", f"{path}/ft-1"] = Reply(body=JOB_BODY)
    with pytest.raises(TimeoutError, match="ft-1"):
        jobs.wait(job_id="ft-1", timeout=0, poll_interval=0.01)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"Job ft-1 is still queued after 0\.1 s"):
        jobs.wait_for_job(job_id="ft-1", timeout=0.1, poll_interval=30)
    assert time.monotonic() - began < 5


def test_a_wait_outlives_the_retries_of_its_looks_and_tells_each_outage(server, caplog):
    path = "/v1/fine_tuning/jobs/ft-1"
    server.replies["GET", path] = Reply(body={**JOB_BODY, "status": "succeeded"})
    server.fail("/ft-1", 503, times=5)
    with TokenFactory(server.url, "k", max_retries=1, tenacity_retry_wait=tenacity.wait_none()) as client:
        jobs = client.v1.fine_tuning.jobs
        assert jobs.wait(job_id="ft-1", poll_interval=0.01).status is fine_tuning.Status.succeeded
        told = [record.message for record in caplog.records]
        assert [line.split(":")[0] for line in told] == [
            "Asking for job ft-1 again",
            "The server answers again about job ft-1, after 0 s",
        ]
        assert "InternalServerError: Status code: 503" in told[0]
        server.fail("/ft-1", 503, times=1000)
        with pytest.raises(TimeoutError, match=r"Job ft-1: no answer of the server .*503.*gave up after 0\.1 s"):
            jobs.wait(job_id="ft-1", timeout=0.1, poll_interval=0.01)
        server.faults = [Fault("/ft-1", Reply(401, {"detail": "no such key"}))]
        with pytest.raises(BadRequestError, match="no such key"):
            jobs.wait(job_id="ft-1")
    unreachable = TokenFactory("http://127.0.0.1:9", "k", max_retries=0)
    with unreachable, pytest.raises(TimeoutError, match="ConnectError"):
        unreachable.v1.fine_tuning.jobs.wait(job_id="ft-1", timeout=0.05, poll_interval=0.01)


def test_a_negative_number_of_batches_is_named(client, server):
    body = {"inference_version": 0, "total_batches": None, "filled_batches": -1}
    server.faults = [Fault("/status", Reply(body=body))]
    with pytest.raises(APIError, match="no JobStatus: filled_batches: Input should be greater than or equal to 0"):
        client.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id="ft-1")


def test_files(client, server, tmp_path):
    answer = {"id": "file-1", "bytes": 3, "created_at": 1, "filename": "a.jsonl", "purpose": "fine-tune"}
    server.replies["POST", "/v1/files"] = Reply(body=answer)
    (tmp_path / "a.jsonl").write_bytes(b"{}\n")
    assert client.v1.files.create(file=tmp_path / "a.jsonl").id == "file-1"
    assert b'filename="a.jsonl"' in server.requests[0].raw
    assert b"fine-tune" in server.requests[0].raw


def test_unknown_values_of_enums_are_kept_as_text() -> None:
    """Failure V2."""
    assert rl_job.Batch.model_validate({"index": 0, "status": "filled"}).status is rl_job.BatchStatus.filled
    assert rl_job.Batch.model_validate({"index": 0, "status": "sealed"}).status == "sealed"


def test_models_are_reexported_and_strict_about_ranges():
    assert reexported.Sample is rl_job.Sample
    with pytest.raises(ValidationError):
        rl_job.CreateBatchRequest(index=-1)
    with pytest.raises(ValidationError):
        rl_job.JobStatus(filled_batches=0, total_batches=None)
    with pytest.raises(ValidationError):
        fine_tuning.SupervisedHParameters(batch_size=65)
    assert fine_tuning.SpecDraftHParameters().learning_rate == 0.0075


def test_import_is_light():
    code = (
        "import sys, upweight.rollout, upweight.examples.basic, upweight.examples.grpo\n"
        "print([m for m in ('jax', 'numpy', 'openai') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
