"""A job that starts from a checkpoint of an earlier one."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from server_harness import Running, Start


@pytest.fixture
def trained(start: Start) -> tuple[Running, str, dict[int, str]]:
    """A server, a job with checkpoints of versions 1 and 2 that is over, its fingerprints."""
    server = start()
    job = server.create_job(num_batches=2, checkpoint_every=1)
    for index in range(2):
        server.fill(job, index)
    done = server.wait_status(job, "succeeded")
    return server, job, {one["version"]: one["fingerprint"] for one in done["versions"]}


def create(server: Running, origin: Any, model: str | None = None) -> Any:
    method = {"type": "reinforcement", "reinforcement": {"batch_size": 2, "num_batches": 1}}
    body = {"model": model or server.model, "method": method, "from_checkpoint": origin}
    return server.http.post("/v1/fine_tuning/jobs", json=body)


def test_it_starts_with_the_weights_of_the_checkpoint_and_outlives_the_earlier_job(
    trained: tuple[Running, str, dict[int, str]],
) -> None:
    server, first, prints = trained
    origin = {"type": "ft", "checkpoint_id": f"ftckpt-{first}-1"}
    made = create(server, origin)
    assert made.status_code == 200, made.text
    job = made.json()["id"]
    assert made.json()["from_checkpoint"] == {**origin, "job_id": first, "step": 1}
    started = server.wait(job, lambda p: p["inference_version"] == 0)
    assert started["versions"][0]["fingerprint"] == prints[1]
    assert not (server.home / "jobs" / job / "origin").exists()
    shutil.rmtree(server.home / "jobs" / first)
    server.stop()


def test_by_job_and_step_across_a_kill_before_the_start_model_is_whole(
    trained: tuple[Running, str, dict[int, str]], start: Start
) -> None:
    server, first, prints = trained
    blocker = server.create_job(num_batches=1)  # holds the only place
    server.wait(blocker, lambda p: p["inference_version"] == 0)
    job = create(server, {"type": "ft", "job_id": first, "step": 2}, model=first).json()["id"]
    shutil.rmtree(server.home / "jobs" / first / "checkpoints")
    folder = server.home / "jobs" / job
    half = folder / ".start.partial"  # as a server leaves it that is killed meanwhile
    half.mkdir()
    (half / "model-00002-of-00002.safetensors").write_text("half")
    server.http.post(f"/v1/fine_tuning/jobs/{blocker}/cancel")
    started = server.wait(job, lambda p: p["inference_version"] == 0)
    assert started["versions"][0]["fingerprint"] == prints[2]
    assert sorted(path.name for path in (folder / "start").iterdir()) == ["config.json", "model.safetensors"]
    server.stop()
    server = start()  # and is not made again
    server.fill(job, 0)
    assert server.wait_status(job, "succeeded")["versions"][0]["fingerprint"] == prints[2]


def test_a_checkpoint_with_other_weights_fails_the_job(trained: tuple[Running, str, dict[int, str]]) -> None:
    server, first, _ = trained
    state = server.home / "jobs" / first / "checkpoints" / "00000001" / "state.json"
    state.write_text(state.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    job = create(server, {"type": "ft", "job_id": first, "step": 1}).json()["id"]
    failed = server.wait_status(job, "failed")
    assert failed["error"]["code"] == "not_loaded"
    assert "holds other weights" in failed["error"]["message"]


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ({"type": "hf", "repo": "r", "token": "very-secret"}, "nothing is downloaded"),
        ({"type": "ft"}, "checkpoint_id"),
        ({"type": "ft", "job_id": "JOB"}, "step"),
        ({"type": "ft", "job_id": "JOB", "step": True}, "step"),
        ({"type": "ft", "job_id": "JOB", "step": 7}, "does not exist"),
        ({"type": "ft", "job_id": "ftjob-none", "step": 1}, "job ftjob-none does not exist"),
        ({"type": "ft", "checkpoint_id": "ftckpt-JOB-x"}, "does not exist"),
        ({"type": "ft", "checkpoint_id": "../../etc"}, "does not exist"),
        ({"type": "ft", "checkpoint_id": "ftckpt-JOB-1", "job_id": "ftjob-other"}, "does not exist"),
        ({"type": "ft", "checkpoint_id": "ftckpt-JOB-1", "stp": 1}, "known: type, checkpoint_id, job_id, step"),
        ("ftckpt-JOB-1", "must be"),
    ],
)
def test_refused_origins(shared: Running, origin: Any, words: str) -> None:
    job = shared.http.get("/v1/fine_tuning/jobs").json()["data"][-1]["id"]
    if isinstance(origin, dict):
        origin = {key: value.replace("JOB", job) if isinstance(value, str) else value for key, value in origin.items()}
    answer = create(shared, origin)
    assert answer.status_code == 422
    assert words in answer.json()["detail"][0]["msg"]
    assert "very-secret" not in answer.text


def test_another_model_or_a_checkpoint_that_is_gone_leave_nothing(trained: tuple[Running, str, dict[int, str]]) -> None:
    server, first, _ = trained
    origin = {"type": "ft", "job_id": first, "step": 1}
    other = create(server, origin, model=str(server.home))
    assert other.status_code == 422
    assert "the checkpoint is of a job on" in other.json()["detail"][0]["msg"]
    shutil.rmtree(server.home / "jobs" / first / "checkpoints" / "00000001")
    gone = create(server, origin)
    assert (gone.status_code, gone.json()["detail"][0]["type"]) == (422, "checkpoint_not_found")
    assert [path.name for path in (server.home / "jobs").iterdir()] == [first]
