"""Async rollouts that block the event loop they share: failure H14 where a place is not a thread."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections import Counter
from typing import Any

import pytest

from upweight.rollout import dispatcher, waits
from upweight.rollout.group_log import read_groups

from . import helpers

release = threading.Event()


@pytest.fixture(autouse=True)
def _released():
    release.clear()
    before = set(threading.enumerate())  # tests of other files may have left loops that are blocked for longer
    yield
    release.set()  # the threads that were left behind end
    for left in [t for t in threading.enumerate() if t.name == "rollout-loop" and t not in before]:
        left.join(5)
        assert not left.is_alive()


def block() -> None:
    release.wait(30)


async def block_at_once() -> None:
    block()


async def block_in_a_task() -> None:
    await asyncio.gather(block_at_once(), asyncio.sleep(0))


async def block_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(block)
    await asyncio.sleep(30)


async def block_when_cancelled() -> None:
    try:
        await asyncio.sleep(30)
    finally:
        block()


@pytest.mark.parametrize("how", [block_at_once, block_in_a_task, block_in_a_callback, block_when_cancelled])
def test_a_rollout_that_blocks_the_loop_is_the_only_one_timed_out(
    server: Any, make_runner: Any, caplog: Any, tmp_path: Any, how: Any
) -> None:
    in_flight: Counter[int] = Counter()  # by the thread of their loop
    most: Counter[int] = Counter()

    async def rollout(task: int, context: Any) -> Any:
        if task == 2:
            await how()
        thread = threading.get_ident()
        in_flight[thread] += 1
        most[thread] = max(most[thread], in_flight[thread])
        await asyncio.sleep(0.15)  # also those that were begun stand behind it
        in_flight[thread] -= 1
        return helpers.rollout(task, context)

    file = tmp_path / "groups.jsonl"
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        summary = make_runner(rollout, rollout_timeout=0.4, group_log=file).run()
    assert time.monotonic() - began < 4
    assert (summary.batches_filled, summary.timed_out, summary.failed) == (3, 1, 0)
    assert summary.errors == {"RolloutTimeout": 1}
    assert list(most.values())[1:] == [4]  # the places are kept on the second loop
    (late,) = [group for group in read_groups(file) if group["fate"] == "timed_out"]
    assert late["task"] == 2
    blocked = next(r.getMessage() for r in caplog.records if "Waited for the event loop, blocked for" in r.getMessage())
    assert re.search(rf"blocked for \d s by {late['task_id']}; \d other rollouts go on with another loop", blocked)
    assert "in block" in blocked


def test_rollouts_that_all_block_cost_one_limit_each(server: Any, make_runner: Any) -> None:
    async def rollout(task: int, context: Any) -> Any:
        if task < 4:
            block()
        return helpers.rollout(task, context)

    summary = make_runner(rollout, rollout_timeout=0.25, num_rollout_retries=0).run()
    assert (summary.batches_filled, summary.timed_out, summary.failed) == (3, 4, 0)


def test_the_shortest_limit_counts_each_attempt_that_blocks(server: Any, make_runner: Any) -> None:
    async def rollout(task: int, context: Any) -> Any:
        if task == 2:
            block()
        return helpers.rollout(task, context)

    summary = make_runner(rollout, rollout_timeout=0.1, num_rollout_retries=1).run()
    assert (summary.batches_filled, summary.timed_out, summary.errors) == (3, 1, {"RolloutTimeout": 2})


def test_what_returns_late_from_a_loop_that_was_left_is_ignored(server: Any, make_runner: Any) -> None:
    calls: list[int] = []

    async def rollout(task: int, context: Any) -> Any:
        calls.append(task)
        if task == 2:
            release.wait(0.6)
        elif len(calls) > 6:
            await asyncio.sleep(0.1)
        return helpers.rollout(task, context)

    summary = make_runner(rollout, rollout_timeout=0.25, num_batches=8).run()
    assert (summary.batches_filled, summary.timed_out, summary.accepted) == (8, 1, 32)
    assert len({sample["id"] for sample in server.samples()}) == 32


def test_waiting_behind_a_slow_rollout_is_not_counted(server: Any, make_runner: Any) -> None:
    """Each blocks for less than the limit: none is over it, though all together are."""

    async def rollout(task: int, context: Any) -> Any:
        await asyncio.sleep(0.05)
        if task < 3:
            release.wait(0.35)
        return helpers.rollout(task, context)

    summary = make_runner(rollout, rollout_timeout=0.6).run()
    assert (summary.batches_filled, summary.timed_out, summary.errors) == (3, 0, {})


def test_a_callback_of_nobody_fails_what_stands_behind_it(server: Any, make_runner: Any) -> None:
    """Started by a thread of its own, it has no rollout that could be given up: the run must still come to an end."""

    async def rollout(task: int, context: Any) -> Any:
        if task == 2:
            loop = asyncio.get_running_loop()
            threading.Thread(target=loop.call_soon_threadsafe, args=(block,)).start()
        await asyncio.sleep(0.1)
        return helpers.rollout(task, context)

    summary = make_runner(rollout, rollout_timeout=0.4).run()
    assert (summary.batches_filled, summary.timed_out) == (3, 0)
    assert 1 <= summary.failed <= 4
    assert summary.errors == {"EventLoopBlocked": summary.failed}


@pytest.mark.parametrize("how", [block_at_once, block_in_a_callback])
def test_without_a_limit_the_wait_and_the_report_say_so(
    server: Any, make_runner: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    monkeypatch.setattr(dispatcher, "TOLD_HOLD_S", 0.2)
    monkeypatch.setattr(waits, "WARN_EVERY_S", 0.5)

    async def rollout(task: int, context: Any) -> Any:
        if task == 2:
            await how()
        return helpers.rollout(task, context)

    runner = make_runner(rollout, shutdown_timeout=0.5)
    thread = threading.Thread(target=runner.run)
    thread.start()
    deadline = time.monotonic() + 5
    while "No progress" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    report = runner.report()
    release.set()
    runner.stop()
    thread.join(5)
    assert re.search(
        r"No progress for 1 s; waiting for .*; the event loop, blocked for \d s by task-\w+$", caplog.text, re.M
    )
    assert re.search(r"(?s)the event loop, blocked for \d s by task-\w+:\n.*in block\n", report)
