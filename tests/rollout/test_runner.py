"""Whole runs against the fake server."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from . import helpers


def assert_adds_up(summary):
    assert summary.started == summary.fates


@pytest.mark.parametrize(
    "settings", [{}, {"allowed_staleness": -1}, {"allowed_staleness": 2, "num_samples_per_task": 2}]
)
@pytest.mark.parametrize("drop", [False, True])
def test_a_bounded_run_fills_its_batches(server, make_runner, settings, drop):
    """Failures H1, H2."""
    summary = make_runner(helpers.slow_rollout, drop_stale_trajectories=drop, **settings).run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert server.worst_staleness() <= settings.get("allowed_staleness", 0)
    assert summary.batches_filled == 3
    assert summary.reason == "all batches are filled"
    assert_adds_up(summary)
    assert 3 not in server.batches


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_rejections_and_failures_are_replaced(server, make_runner, executor):
    """Failure H1 and report E2."""
    summary = make_runner(helpers.picky_rollout, executor_type=executor, allowed_staleness=1, max_concurrency=2).run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert summary.accepted == 12
    assert summary.rejected >= 4
    assert summary.failed >= 1
    assert_adds_up(summary)


def test_async_rollouts(server, make_runner):
    assert make_runner(helpers.async_rollout).run().accepted == 12


def test_samples_are_stamped(server, make_runner):
    """Report M10: the group of a sample can be told."""
    make_runner(num_samples_per_task=2).run()
    infos = [sample["debug_info"] for sample in server.samples()]
    assert all(isinstance(info["starting_inference_version"], int) for info in infos)
    assert len({info["task_id"] for info in infos}) == 6


def test_several_runs_of_one_runner(server, make_runner):
    """Failures X11, H3."""
    runner = make_runner(num_batches=2)
    assert runner.run().accepted == 8
    again = runner.run()
    assert (again.started, again.reason) == (0, "all batches were filled already")


def open_files():
    """Descriptors of this process but TCP connections: those belong to the caller's client and to the fake server."""
    table = Path("/proc/net/tcp")
    tcp = {line.split()[9] for line in table.read_text().splitlines()[1:]} if table.exists() else set()
    found = []
    for fd in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            found.append(os.readlink(fd))
    return sorted(name for name in found if not any(name == f"socket:[{inode}]" for inode in tcp))


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_nothing_is_left_after_a_run(server, make_runner, executor):
    """Failure W5."""
    make_runner(num_batches=1, executor_type=executor, max_concurrency=1).run()  # starts multiprocessing's own helpers
    files, threads = open_files(), set(threading.enumerate())
    make_runner(num_batches=2, executor_type=executor, max_concurrency=1).run()
    started = set(threading.enumerate()) - threads
    assert [t.name for t in started if t.name.startswith("rollout-")] == []
    assert len(open_files()) <= len(files)
