"""What a job waits for, told in words: the rules, and the route."""

from __future__ import annotations

from typing import Any

import pytest
from server_harness import Running, Start

from upweight.server.waiting import QUIET, Facts, explain_wait, span


def facts(**changes: Any) -> Facts:
    usual: dict[str, Any] = {
        "job_id": "ftjob-1",
        "job_status": "waiting_for_samples",
        "reason": "",
        "batch_index": 3,
        "in_batch": 12,
        "batch_size": 32,
        "places": 1,
        "seconds_up": 500.0,
        "status_age": 0.5,
        "completion_age": 2.0,
        "upload_age": 20.0,
        "phase": "ready",
    }
    return Facts(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        (
            {"status_age": None, "completion_age": None, "upload_age": None},
            "stalled",
            "TOKENFACTORY_ROLLOUT_JOB_ID=ftjob-1",
        ),
        ({"active": 8, "queued": 3}, "working", "8 requests are being answered, 3 more wait"),
        (
            {"status_age": 90.0, "completion_age": 90.0, "upload_age": 95.0},
            "stalled",
            "No rollout program was heard for 90 s",
        ),
        ({"completion_age": 200.0, "upload_age": 300.0}, "stalled", "a rollout function or a grader is still running"),
        ({"completion_age": 200.0, "upload_age": QUIET - 1}, "working", "heard 0 s ago"),
        ({"completion_age": None, "upload_age": None, "seconds_up": 30.0}, "working", "heard 0 s ago"),
        ({"job_status": "queued", "phase": None}, "waiting", "1 job may run at a time"),
        ({"job_status": "loading", "detail": "reads weights"}, "working", "Loads the model: reads weights"),
        ({"job_status": "training", "detail": "batch 3"}, "working", "Trains: batch 3"),
        ({"job_status": "succeeded", "reason": "all 3 batches are trained"}, "over", "all 3 batches are trained"),
        ({"job_status": "failed", "reason": "out of memory"}, "over", "out of memory"),
    ],
)
def test_rules(changes: dict[str, Any], state: str, words: str) -> None:
    told = explain_wait(facts(**changes))
    assert told["state"] == state
    assert words in told["headline"]
    assert [part["part"] for part in told["parts"]] == ["rollouts", "batch", "engine", "trainer"]
    assert all(part["text"] for part in told["parts"])


def test_each_part_says_its_own() -> None:
    parts = {one["part"]: one["text"] for one in explain_wait(facts(active=5, tokens_per_second=321.4))["parts"]}
    assert parts["batch"] == "Batch 3 holds 12 of 32 samples; the last upload came 20 s ago"
    assert parts["engine"] == "5 requests at 321 tokens/s, 0 wait"
    assert parts["trainer"] == "Waits for 20 more samples"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h")])
def test_span(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_the_route_follows_the_job(start: Start) -> None:
    server: Running = start()
    job = server.create_job(num_batches=1)
    server.wait_status(job, "waiting_for_samples")

    def waiting() -> dict[str, Any]:
        return server.http.get(server.rl(job, "waiting")).json()

    assert waiting()["state"] == "stalled"
    server.status(job)
    assert waiting()["state"] == "working"
    server.fill(job, 0)
    server.wait_status(job, "succeeded")
    assert waiting()["state"] == "over"
