"""Whole runs against the fake server."""

import os
import threading

import pytest

from . import helpers


def assert_adds_up(summary):
    assert summary.started == summary.fates


@pytest.mark.parametrize(
    "settings", [{}, {"allowed_staleness": -1}, {"allowed_staleness": 2, "num_samples_per_task": 2}]
)
@pytest.mark.parametrize("drop", [False, True])
def test_a_bounded_run_fills_its_batches(server, make_runner, settings, drop):
    summary = make_runner(helpers.slow_rollout, drop_stale_trajectories=drop, **settings).run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert server.worst_staleness() <= settings.get("allowed_staleness", 0)
    assert summary.batches_filled == 3
    assert summary.reason == "all batches are filled"
    assert_adds_up(summary)
    assert 3 not in server.batches


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_rejections_and_failures_are_replaced(server, make_runner, executor):
    summary = make_runner(helpers.picky_rollout, executor_type=executor, allowed_staleness=1).run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert summary.accepted == 12
    assert summary.rejected >= 4
    assert summary.failed >= 1
    assert_adds_up(summary)


def test_async_rollouts(server, make_runner):
    assert make_runner(helpers.async_rollout).run().accepted == 12


def test_samples_are_stamped(server, make_runner):
    make_runner(num_samples_per_task=2).run()
    infos = [sample["debug_info"] for sample in server.samples()]
    assert all(isinstance(info["starting_inference_version"], int) for info in infos)
    assert len({info["task_id"] for info in infos}) == 6


def test_several_runs_of_one_runner(server, make_runner):
    runner = make_runner(num_batches=2)
    assert runner.run().accepted == 8
    again = runner.run()
    assert (again.started, again.reason) == (0, "all batches were filled already")


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_nothing_is_left_after_a_run(server, make_runner, executor):
    def files():
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    make_runner(num_batches=1, executor_type=executor, max_concurrency=1).run()  # opens the client's own connection
    files_before, threads_before = files(), set(threading.enumerate())
    make_runner(num_batches=2, executor_type=executor, max_concurrency=1).run()
    started = set(threading.enumerate()) - threads_before
    assert [t.name for t in started if t.name.startswith("rollout-")] == []
    assert files() <= files_before + 1
