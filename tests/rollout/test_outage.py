"""Rollouts that all fail: the run slows down, says so, keeps the data for later, and still ends as it should."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from typing import Any

import pytest

from upweight.rollout import DatasetExhausted, RolloutStalled, waits
from upweight.rollout.datasets import SequenceDataset
from upweight.rollout.models import SampleGroup

from . import helpers
from .test_runner import assert_adds_up


def messages(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if part in r.getMessage()]


@pytest.mark.parametrize("function", [helpers.unlucky_rollout, helpers.async_unlucky_rollout])
def test_a_broken_rollout_does_not_spin(
    server: Any, make_runner: Any, caplog: pytest.LogCaptureFixture, function: Any
) -> None:
    """Failure W8: pauses of 0.1, 0.2, 0.4 … s with one rollout after each, one line a second, and no waiting at the end."""
    dataset = helpers.Counting()
    runner = make_runner(function, dataset, num_batches=None)
    seen: list[str] = []
    threading.Timer(0.9, lambda: (seen.append(runner.progress().waiting_for), runner.stop())).start()
    began = time.monotonic()
    summary = runner.run()
    assert time.monotonic() - began < 1.4
    assert summary.reason == "stopped"
    assert 4 <= summary.failed == summary.started <= 3 * 4
    assert dataset.served <= 3 * 4
    assert_adds_up(summary)
    lines = messages(caplog, "failed after 1 attempts (ValueError: no luck)")
    assert len(lines) <= 3
    assert sum(1 + int((re.findall(r"and (\d+) more", line) or ["0"])[0]) for line in lines) == summary.failed
    assert re.match(r"a rollout that succeeds \(\d+ rollouts failed in a row, the last one with ValueError", seen[0])


def test_an_outage_costs_few_tasks_and_its_end_is_noticed(
    server: Any, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Failed tasks that may come again do so before fresh ones are drawn; with one success the run is at full speed again."""
    began = time.monotonic()
    calls: Counter[int] = Counter()

    def rollout(task: int, context: Any) -> SampleGroup:
        calls[task] += 1
        if time.monotonic() - began < 0.8:
            raise ConnectionError("the tool server is away")
        return helpers.rollout(task, context)

    dataset = SequenceDataset(list(range(12)))
    summary = make_runner(rollout, dataset=dataset, requeue_lost_tasks=4).run()
    assert (summary.batches_filled, summary.accepted) == (3, 12)  # none of the twelve was lost
    assert summary.failed <= 12
    assert len([task for task, n in calls.items() if n > 1]) <= 8
    assert time.monotonic() - began < 3
    assert messages(
        caplog, "rollouts failed in a row, the last one with ConnectionError: the tool server is away; one is"
    )
    assert messages(caplog, "A rollout succeeded again after")


def test_failures_are_no_progress(
    server: Any, make_runner: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report H11: the line on what a run waits for comes although rollouts start and end."""
    monkeypatch.setattr(waits, "WARN_EVERY_S", 0.4)
    with pytest.raises(RolloutStalled, match=r"No sample was accepted.*errors: \{'ValueError': \d+\}"):
        make_runner(helpers.unlucky_rollout, no_progress_timeout=0.9).run()
    assert "waiting for a rollout that succeeds (" in messages(caplog, "No progress for")[0]


def test_a_finite_dataset_of_failures_still_ends(server: Any, make_runner: Any) -> None:
    """Failure H9."""
    with pytest.raises(DatasetExhausted, match="6 failed"):
        make_runner(helpers.unlucky_rollout, helpers.Counting(6)).run()


def test_failures_between_successes_hold_nothing_back(server: Any, make_runner: Any) -> None:
    def rollout(task: int, context: Any) -> SampleGroup:
        if task % 3:
            raise ValueError("two in three")
        return helpers.rollout(task, context)

    began = time.monotonic()
    summary = make_runner(rollout, num_batches=30, allowed_staleness=None).run()
    assert (summary.accepted, summary.failed >= 238) == (120, True)
    assert time.monotonic() - began < 4
