"""Workers that die, updates that fail, servers that start again."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from typing import Any

import httpx
import pytest
from server_harness import Running, Start, sample

from upweight.errors import StoreError
from upweight.server.supervision.worker_process import WorkerProcess, start_worker


def fingerprints(server: Running, job: str) -> list[str]:
    return [version["fingerprint"] for version in server.progress(job)["versions"]]


def test_a_worker_killed_in_training_is_replaced_and_ends_with_the_same_fingerprints(start: Start) -> None:
    undisturbed = start()
    job = undisturbed.create_job(num_batches=4, checkpoint_every=2)
    for index in range(4):
        undisturbed.fill(job, index)
    undisturbed.wait_status(job, "succeeded")
    expected = fingerprints(undisturbed, job)
    undisturbed.stop()

    server = start({"die_in_training": [0, 3]})
    job = server.create_job(num_batches=4, checkpoint_every=2)
    for index in range(4):
        server.fill(job, index)
    server.wait_status(job, "succeeded")
    assert fingerprints(server, job) == expected
    deaths = [message for message in server.events(job) if "exit code 7" in message]
    assert len(deaths) == 2
    assert "out of memory in batch 0" in deaths[0]
    assert "worker is at version 3 again, with the recorded fingerprint" in server.events(job)


def test_requests_wait_while_a_killed_worker_is_replaced(start: Start) -> None:
    server = start({"generate_seconds": 0.5})
    job = server.create_job(num_batches=3, checkpoint_every=5)
    server.fill(job, 0)
    server.fill(job, 1)
    at_two = server.wait(job, lambda p: p["inference_version"] == 2 and p["worker"])
    answers: list[int] = []

    def ask() -> None:
        chat = server.rl(job, "inference/openai/v1/chat/completions")
        answer = server.http.post(chat, json={"model": "m", "messages": []})
        answers.append(answer.json().get("inference_version", answer.status_code))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    os.kill(at_two["worker"]["pid"], signal.SIGKILL)
    seen = set()
    while any(thread.is_alive() for thread in threads):
        seen.add(server.status(job)["inference_version"])
        time.sleep(0.02)
    assert answers == [2, 2, 2, 2]
    assert seen <= {2}
    assert any("killed by signal 9" in message for message in server.events(job))


def test_a_replay_with_another_fingerprint_fails_the_job_with_both(start: Start) -> None:
    server = start({"die_in_training": [1], "corrupt_after_restart": True})
    job = server.create_job(num_batches=2)
    server.fill(job, 0)
    server.fill(job, 1)
    end = server.wait_status(job, "failed")
    assert end["error"]["code"] == "fingerprint_mismatch"
    assert end["versions"][1]["fingerprint"] in end["error"]["message"]
    refused = server.http.get(server.rl(job, "inference/openai/v1/models"))
    assert refused.status_code == 409


def test_a_worker_that_cannot_start_fails_the_job_after_the_allowed_restarts(start: Start) -> None:
    server = start({"die_at_start": True}, max_restarts=2)
    job = server.create_job()
    end = server.wait_status(job, "failed")
    assert end["error"]["code"] == "worker_died"
    assert "exit code 5" in end["error"]["message"]
    assert "cannot load" in end["error"]["message"]
    assert sum("restart" in message for message in server.events(job)) == 2
    assert server.http.get(f"/v1/fine_tuning/jobs/{job}").json()["error"]["code"] == "worker_died"


def test_a_model_that_cannot_be_loaded_fails_the_job_at_once_with_one_line(start: Start) -> None:
    server = start({"cannot_load": True})
    job = server.create_job()
    end = server.wait_status(job, "failed")
    assert (end["error"]["code"], end["reason"]) == ("not_loaded", "gemma7 is not a model that can be run here")
    assert not any("restart" in message for message in server.events(job))


def test_a_worker_that_says_nothing_is_killed_and_replaced(start: Start) -> None:
    server = start({"hang_in_training": [0]}, worker_silence_timeout=0.5)
    job = server.create_job(num_batches=1)
    server.fill(job, 0)
    server.wait_status(job, "succeeded")
    assert any("no answer for" in message and "signal 9" in message for message in server.events(job))


def test_a_client_that_goes_away_takes_its_request_along(start: Start) -> None:
    server = start({"generate_seconds": 20})
    job = server.create_job()
    server.wait(job, lambda p: p["inference_version"] == 0)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(server.rl(job, "inference/openai/v1/completions"), json={"prompt": "x"}, timeout=0.3)
    end = time.monotonic() + 5
    while not (server.home / "jobs" / job / "abandoned").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_finished_job_whose_checkpoints_are_gone_is_not_served_from_the_start_model(start: Start) -> None:
    first = start()
    job = first.create_job(num_batches=1)
    first.fill(job, 0)
    first.wait_status(job, "succeeded")
    first.stop()
    second = start()
    models = second.rl(job, "inference/openai/v1/models")
    assert second.http.get(models).status_code == 200
    second.stop()
    shutil.rmtree(second.home / "jobs" / job / "checkpoints")
    third = start()
    refused = third.http.get(models)
    assert refused.status_code == 409
    assert "no longer on the disk" in refused.json()["detail"]


def test_skipped_updates_are_published_and_several_in_a_row_fail_the_job(start: Start) -> None:
    server = start({"skip_updates": True})
    job = server.create_job(num_batches=5)
    for index in range(3):
        server.fill(job, index)
    end = server.wait_status(job, "failed")
    assert end["error"]["code"] == "updates_skipped"
    assert end["inference_version"] == 3
    assert len(set(fingerprints(server, job))) == 1


def test_a_restarted_server_resumes_the_job_where_it_was(start: Start) -> None:
    first = start()
    job = first.create_job(num_batches=3, checkpoint_every=5)
    first.fill(job, 0)
    first.wait(job, lambda p: p["inference_version"] == 1)
    first.http.post(first.rl(job, "batches"), json={"index": 1})
    first.upload(job, 1, [sample("s1-0", debug_info={"task_id": "t1", "reward": 0.5})])
    before = fingerprints(first, job)
    first.stop()

    second = start()
    assert second.status(job)["inference_version"] == 1
    assert second.http.get(second.rl(job, "batches/1")).json()["sample_count"] == 1
    second.fill(job, 1)  # s1-0 is known already: only the other one is new
    second.fill(job, 2)
    second.wait_status(job, "succeeded")
    assert fingerprints(second, job)[:2] == before
    assert "server started again: the job is resumed" in second.events(job)


def test_a_budget_ends_the_job_with_a_usable_result(start: Start) -> None:
    server = start()
    job = server.create_job(num_batches=None, budget={"max_samples": 4})
    for index in range(2):
        server.fill(job, index)
    end = server.wait_status(job, "succeeded")
    assert end["reason"] == "budget max_samples = 4 is used up (4)"
    assert end["versions"][2]["checkpoint"]


def test_a_budget_of_time_ends_a_job_that_only_waits(start: Start) -> None:
    server = start()
    job = server.create_job(num_batches=None, budget={"max_seconds": 0.5})
    assert "max_seconds" in server.wait_status(job, "succeeded")["reason"]


def test_a_full_disk_at_the_end_waits_for_room(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upweight.server.supervision.runner.STORE_PAUSE", 0.05)
    server = start({"full_exports": 2})
    job = server.create_job(num_batches=1)
    server.fill(job, 0)
    assert server.wait_status(job, "succeeded", "failed")["weights"]
    full = [message for message in server.events(job) if "the disk is full: free some space" in message]
    assert len(full) == 2


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "the server cannot write to its disk (No space left on device)"),
        (errno.EMFILE, "the machine is short of something (Too many open files)"),
    ],
)
def test_a_worker_that_cannot_be_started_now_is_started_later(
    start: Start, monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    monkeypatch.setattr("upweight.server.supervision.runner.STORE_PAUSE", 0.2)
    tries = []

    async def begin(*arguments: Any) -> WorkerProcess:
        tries.append(arguments)
        if len(tries) < 3:
            raise OSError(number, os.strerror(number))
        return await start_worker(*arguments)

    monkeypatch.setattr("upweight.server.supervision.runner.start_worker", begin)
    server = start()
    job = server.create_job()
    server.wait(job, lambda p: p["reason"].startswith(told))
    server.wait(job, lambda p: p["inference_version"] == 0)
    assert len(tries) == 3


def test_orders_that_cannot_be_stored_change_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    job, other = server.create_job(), server.create_job()
    server.wait(job, lambda p: p["inference_version"] == 0)
    with monkeypatch.context() as patch:
        for name in ("pause", "add_event"):
            patch.setattr(f"upweight.server.store.jobs.{name}", refuse)
        for asked in (job, other):
            for order in ("pause", "cancel"):
                answer = server.http.post(f"/v1/fine_tuning/jobs/{asked}/{order}")
                assert (answer.status_code, "nothing was stored, try again" in answer.text) == (503, True)
    assert "paused" not in {server.status(one)["job_status"] for one in (job, other)}
    server.wait_status(job, "waiting_for_samples")
    server.fill(job, 0)
    server.wait(job, lambda p: p["inference_version"] == 1)
    assert server.http.post(f"/v1/fine_tuning/jobs/{job}/cancel").json()["status"] == "cancelled"
    server.wait(other, lambda p: p["inference_version"] == 0)


def refuse(*_: Any, **__: Any) -> None:
    raise StoreError("the disk is full")
