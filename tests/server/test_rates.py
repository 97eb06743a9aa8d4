"""Requests per second of a project."""

from __future__ import annotations

import contextlib
import time

import pytest
from server_harness import Start

from upweight.server.rates import Rates
from upweight.server.refusals import Refusal


def test_a_burst_passes_then_the_rate_holds_for_each_project_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rates = Rates(5.0)

    def passed(project: str, seconds: float) -> int:
        count = 0
        for _ in range(round(seconds * 100)):
            now[0] += 0.01
            with contextlib.suppress(Refusal):
                rates.take(project)
                count += 1
        return count

    assert 59 <= passed("a", 10.0) <= 61  # 10 of the burst and 5 a second
    assert 10 <= passed("b", 0.2) <= 12
    assert 4 <= passed("a", 0.8) <= 5


def test_without_a_limit_all_pass() -> None:
    rates = Rates(None)
    for _ in range(10_000):
        rates.take("a")


def test_the_server_answers_429_with_the_time_to_wait(start: Start) -> None:
    server = start(max_requests_per_second=2)
    answers = [server.http.get("/v1/fine_tuning/jobs") for _ in range(8)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert answers[0].status_code == 200
    assert refused
    assert "more than 2 requests a second of project default" in refused[0].json()["detail"]
    assert refused[0].headers["retry-after"] == "1"
    assert server.http.get("/healthz").status_code == 200
