"""Rows of the two lists of failures that were only shown on parts: here through `run()`, against a real server."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest

from tests.fakes import Fault
from upweight.rollout import JobUnavailable
from upweight.rollout.models import SampleGroup

from . import helpers
from .test_runner import assert_adds_up


def test_a_retried_rollout_has_the_version_of_the_attempt_that_gave_its_samples(server: Any, make_runner: Any) -> None:
    """Failure D8: not the one known when the task was first started; per-token versions are uploaded as they came."""
    server.trains = False
    attempts: Counter[int] = Counter()

    def rollout(task: int, context: Any) -> SampleGroup:
        attempts[task] += 1
        if task == 5 and attempts[task] == 1:
            server.version = 1
            time.sleep(0.15)  # until the run knows
            raise ConnectionError("the engine restarted")
        info = {"token_inference_versions": [1, 0]} if task == 6 else {}
        return SampleGroup(samples=[helpers.good_sample(metadata={"task": str(task)}, debug_info=info)])

    make_runner(rollout, num_batches=2, allowed_staleness=1, max_concurrency=1, num_rollout_retries=1).run()
    infos = {int(sample["metadata"]["task"]): sample["debug_info"] for sample in server.samples()}
    assert attempts[5] == 2
    assert [infos[n]["starting_inference_version"] for n in range(6)] == [0, 0, 0, 0, 0, 1]
    assert (infos[6]["token_inference_versions"], infos[6]["starting_inference_version"]) == ([1, 0], 0)


def test_retries_wait_longer_each_time(server: Any, make_runner: Any) -> None:
    """Failure W8."""
    began: list[float] = []

    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 0:
            began.append(time.monotonic())
            raise ConnectionError("not yet")
        return helpers.rollout(task, context)

    settings = {"num_rollout_retries": 2, "rollout_retry_backoff": 0.1, "max_concurrency": 1, "num_batches": 1}
    summary = make_runner(rollout, **settings).run()
    first, second = began[1] - began[0], began[2] - began[1]
    assert 0.08 <= first < 0.3
    assert 0.16 <= second < 0.5
    assert (summary.failed, summary.retries) == (1, 2)
    assert_adds_up(summary)


@pytest.mark.parametrize("is_async", [False, True])
def test_leaving_and_cancelling_inside_a_rollout_cost_that_rollout_only(
    server: Any, make_runner: Any, is_async: bool
) -> None:
    """Failure H10: without `raise_on_rollout_failure` they are replaced like any other failure."""

    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 1:
            sys.exit(3)
        if task == 2:
            raise asyncio.CancelledError
        if task == 3:
            raise GeneratorExit
        return helpers.rollout(task, context)

    async def rollout_async(task: int, context: Any) -> SampleGroup:
        await asyncio.sleep(0)
        return rollout(task, context)

    summary = make_runner(rollout_async if is_async else rollout).run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert (summary.failed, summary.errors) == (3, {"SystemExit": 1, "CancelledError": 1, "GeneratorExit": 1})
    assert_adds_up(summary)


def test_an_interval_of_zero_polls_at_most_a_hundred_times_a_second(server: Any, make_runner: Any) -> None:
    """Failure W7."""
    server.trains = False
    runner = make_runner(status_polling_interval=0, num_batches=None)
    threading.Timer(0.4, runner.stop).start()
    began = time.monotonic()
    runner.run()
    assert 5 < server.count("GET", "/status") <= 100 * (time.monotonic() - began) + 3


def test_the_surplus_of_the_last_group_is_discarded_and_counted(server: Any, make_runner: Any) -> None:
    """Failure H4: three places are left, groups have two samples."""
    server.put_samples(0, 1)
    summary = make_runner(num_samples_per_task=2, num_batches=1).run()
    assert server.sizes() == {0: 4}
    assert (summary.started, summary.accepted, summary.surplus_samples) == (2, 2, 1)


def test_a_short_answer_is_not_the_end_of_the_data(server: Any, make_runner: Any) -> None:
    """Failure H9."""

    class Sparse(helpers.Counting):
        def sample(self, n_samples: int) -> list[int]:
            return super().sample(1)

    assert make_runner(dataset=Sparse()).run().batches_filled == 3
    assert server.sizes() == {0: 4, 1: 4, 2: 4}


@pytest.mark.parametrize("staleness", [0, 1])
def test_dropping_runs_end_full_however_often_a_rollout_comes_too_late(
    server: Any, make_runner: Any, staleness: int
) -> None:
    """Failure H2: every third rollout waits until its batch is gone; N = 6 as in the report."""

    def rollout(task: int, context: Any) -> SampleGroup:
        if task % 3 == 0:
            time.sleep(0.1)
        return helpers.rollout(task, context)

    summary = make_runner(
        rollout, num_batches=6, drop_stale_trajectories=True, allowed_staleness=staleness, max_concurrency=8
    ).run()
    assert server.sizes() == dict.fromkeys(range(6), 4)
    assert server.worst_staleness() <= staleness
    assert summary.batches_filled == 6
    assert_adds_up(summary)


def test_what_is_ready_is_sent_before_an_error_leaves_though_uploads_are_slow(server: Any, make_runner: Any) -> None:
    """Failures X1, H10: the samples were accepted while an upload was under way; they are not lost with the error."""
    server.faults.append(Fault("/samples", delay=0.3, times=9))

    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 6:
            raise KeyError("seven")
        return helpers.rollout(task, context)

    with pytest.raises(KeyError, match="seven"):
        make_runner(rollout, raise_on_rollout_failure=True, max_concurrency=1).run()
    assert server.sizes() == {0: 4, 1: 2}


def test_what_is_ready_is_sent_before_a_lost_job_is_told(server: Any, make_runner: Any) -> None:
    """Failure H8."""
    server.faults.append(Fault("/samples", delay=0.3, times=9))

    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 2:
            server.status_extra = {"job_status": "failed", "error": {"message": "boom"}}
        if task == 3:
            time.sleep(5)
        return helpers.rollout(task, context)

    runner = make_runner(rollout, max_concurrency=1, shutdown_timeout=1.5)
    with pytest.raises(JobUnavailable, match="boom"):
        runner.run()
    assert server.sizes() == {0: 3}


def test_after_a_rollback_tasks_are_stamped_with_the_lower_version(server: Any, make_runner: Any) -> None:
    """Failure X3: those in flight keep theirs."""
    server.trains, server.version = False, 1

    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 3:
            server.version = 0
            time.sleep(0.15)  # until the run knows
        return SampleGroup(samples=[helpers.good_sample(metadata={"task": str(task)})])

    make_runner(rollout, num_batches=2, allowed_staleness=None, max_concurrency=1).run()
    stamps = {int(s["metadata"]["task"]): s["debug_info"]["starting_inference_version"] for s in server.samples()}
    assert [stamps[n] for n in range(8)] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_the_late_result_of_a_rollout_that_was_given_up_is_ignored(server: Any, make_runner: Any) -> None:
    """Failure H14: it comes while the run goes on, and counts nowhere; the only place was free long before."""
    late = threading.Event()

    def rollout(task: int, context: Any) -> SampleGroup:
        time.sleep(0.5 if task == 0 else 0.05)
        if task == 0:
            late.set()
        return SampleGroup(samples=[helpers.good_sample(metadata={"task": str(task)})])

    summary = make_runner(rollout, rollout_timeout=0.2, allowed_staleness=None, max_concurrency=1).run()
    assert late.is_set()
    assert (summary.timed_out, summary.accepted) == (1, 12)
    assert "0" not in {sample["metadata"]["task"] for sample in server.samples()}
    assert_adds_up(summary)
