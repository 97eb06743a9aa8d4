"""Pause and resume: the place is given up, nothing is lost, and the weights are those of a run without a pause."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import openai
import psutil
from server_harness import KEY, Start


def test_a_paused_job_frees_its_place_and_goes_on_with_the_same_weights(start: Start) -> None:
    server = start()
    straight, paused = server.create_job(num_batches=3), server.create_job(num_batches=3)
    server.fill(straight, 0)
    server.wait(straight, lambda p: p["inference_version"] == 1)

    answer = server.http.post(f"/v1/fine_tuning/jobs/{straight}/pause").json()
    assert (answer["job_status"], answer["status"]) == ("paused", "running")
    server.fill(paused, 0)
    server.wait(paused, lambda p: p["inference_version"] == 1)  # it has the place now
    server.fill(straight, 1)  # samples are taken meanwhile, and not trained
    assert server.progress(straight)["version"] == 1
    assert server.http.get("/health").json()["engines"] == 1
    assert server.http.post(f"/v1/fine_tuning/jobs/{straight}/pause").json()["job_status"] == "paused"

    server.http.post(f"/v1/fine_tuning/jobs/{paused}/pause")
    server.http.post(f"/v1/fine_tuning/jobs/{straight}/resume")
    server.fill(straight, 2)
    first = server.wait_status(straight, "succeeded")
    server.http.post(f"/v1/fine_tuning/jobs/{paused}/resume")
    for index in (1, 2):
        server.fill(paused, index)
    second = server.wait_status(paused, "succeeded")
    fingerprints = [[one["fingerprint"] for one in end["versions"]] for end in (first, second)]
    assert fingerprints[0] == fingerprints[1]
    assert [m for m in server.events(straight) if "by request" in m] == [
        "job paused by request",
        "job resumed by request",
    ]


def test_a_paused_job_stays_paused_over_a_restart_and_may_be_cancelled(start: Start) -> None:
    server = start()
    job = server.create_job()
    server.wait(job, lambda p: p["inference_version"] == 0)
    with openai.OpenAI(api_key=KEY, base_url=f"{server.http.base_url}/v1/") as client:
        client.fine_tuning.jobs.pause(job)
    server.stop()
    server = start()
    assert server.progress(job)["job_status"] == "paused"
    with openai.OpenAI(api_key=KEY, base_url=f"{server.http.base_url}/v1/") as client:
        client.fine_tuning.jobs.resume(job)
    server.wait(job, lambda p: p["job_status"] == "waiting_for_samples")
    assert server.http.post(f"/v1/fine_tuning/jobs/{job}/resume").status_code == 200  # as it is: no effect
    server.http.post(f"/v1/fine_tuning/jobs/{job}/pause")
    assert server.http.post(f"/v1/fine_tuning/jobs/{job}/cancel").json()["status"] == "cancelled"
    refused = server.http.post(f"/v1/fine_tuning/jobs/{job}/resume")
    assert (refused.status_code, refused.json()["detail"]) == (409, f"job {job} is over: it was cancelled")


def test_a_queued_job_can_be_paused(start: Start) -> None:
    server = start()
    running, queued = server.create_job(num_batches=1), server.create_job(num_batches=1)
    server.wait(running, lambda p: p["inference_version"] == 0)
    server.http.post(f"/v1/fine_tuning/jobs/{queued}/pause")
    server.fill(running, 0)
    server.wait_status(running, "succeeded")
    assert server.progress(queued)["job_status"] == "paused"
    server.http.post(f"/v1/fine_tuning/jobs/{queued}/resume")
    server.wait(queued, lambda p: p["inference_version"] == 0)


def test_orders_that_cross_leave_one_worker_and_one_end(start: Start) -> None:
    """Pause, resume and cancel of several people at once: one after the other, each whole."""
    server = start(max_running=4)
    job, other = server.create_job(), server.create_job()
    chance = random.Random(0)

    def order(job: str, orders: list[str]) -> None:
        for one in orders:
            assert server.http.post(f"/v1/fine_tuning/jobs/{job}/{one}").status_code in (200, 409)

    for ends in (False, True):
        people = [
            threading.Thread(target=order, args=(one, chance.choices(["pause", "resume"], k=4)))
            for one in (job, other)
            for _ in range(3)
        ]
        people += [threading.Thread(target=order, args=(other, ["cancel"]))] if ends else []
        for person in people:
            person.start()
        for person in people:
            person.join()
        server.http.post(f"/v1/fine_tuning/jobs/{job}/resume")
        server.wait(job, lambda p: p["job_status"] == "waiting_for_samples")
        assert workers_of(job, server.home) == 1
    assert server.progress(other)["job_status"] == "cancelled"
    assert workers_of(other, server.home) == 0
    for index in range(2):
        server.fill(job, index)
    server.wait_status(job, "succeeded")


def workers_of(job: str, home: Path) -> int:
    """How many processes that were started for the job live."""
    file = home / "jobs" / job / "starts"
    started = [int(line) for line in file.read_text().split()] if file.exists() else []
    return sum(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in started)
