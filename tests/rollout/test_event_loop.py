"""Async rollouts share one event loop."""

from __future__ import annotations

import asyncio
import functools
import re
import sys
import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest

from upweight.rollout.event_loop import EventLoopPool, is_async
from upweight.rollout.models import Task
from upweight.rollout.workers import Outcome, RolloutCall

from . import helpers


def pool_of(function: Any) -> tuple[EventLoopPool, SimpleQueue[Outcome]]:
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    return EventLoopPool(RolloutCall(function, None), outcomes.put), outcomes


def test_thousands_in_flight_need_one_thread() -> None:
    arrived = 0
    open_gate = asyncio.Event()

    async def rollout(task: int, context: Any) -> int:
        nonlocal arrived
        arrived += 1
        if arrived == 3000:
            open_gate.set()
        await open_gate.wait()  # only all of them together get through
        return task

    before = set(threading.enumerate())  # threads of other tests may still be ending
    pool, outcomes = pool_of(rollout)
    for number in range(3000):
        pool.submit(number, Task(spec=number, starting_inference_version=0))
    results = sorted(outcomes.get(timeout=30).result for _ in range(3000))
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["rollout-loop"]
    assert results == list(range(3000))
    pool.close(5)
    assert set(threading.enumerate()) <= before


def test_a_run_has_thousands_in_flight(server: Any, make_runner: Any) -> None:
    """Through `run()`: all 2,000 tasks of a batch wait for each other."""
    server.batch_size = 2000
    arrived = 0
    gate = asyncio.Event()

    async def rollout(task: int, context: Any) -> Any:
        nonlocal arrived
        arrived += 1
        if arrived == 2000:
            gate.set()
        await gate.wait()
        return helpers.rollout(task, context)

    before = threading.active_count()
    peak = 0

    def watch(progress: Any) -> None:
        nonlocal peak
        peak = max(peak, threading.active_count())

    runner = make_runner(rollout, batch_size=2000, num_batches=1, max_concurrency=2000)
    runner._publish = watch
    assert runner.run().batches_filled == 1
    assert peak - before < 12  # the helpers of the run, and the server's


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()])
def test_whatever_a_rollout_raises_is_its_own_failure(error: BaseException) -> None:
    async def rollout(task: int, context: Any) -> int:
        if task == 0:
            raise error
        await asyncio.sleep(0.05)
        return task

    pool, outcomes = pool_of(rollout)
    pool.submit(0, Task(spec=0, starting_inference_version=0))
    pool.submit(1, Task(spec=1, starting_inference_version=0))
    first, second = outcomes.get(timeout=10), outcomes.get(timeout=10)
    assert first.error is error
    assert type(error).__name__ in first.traceback
    assert second.result == 1
    pool.close(5)


def test_an_abandoned_rollout_is_cancelled_and_tells_nothing() -> None:
    cancelled = threading.Event()

    async def rollout(task: int, context: Any) -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return task

    pool, outcomes = pool_of(rollout)
    pool.submit(7, Task(spec=7, starting_inference_version=0))
    while pool.began(7) is None:
        time.sleep(0.01)
    pool.abandon(7)
    assert cancelled.wait(5)
    assert pool.began(7) is None
    pool.close(5)
    assert outcomes.empty()


def test_closing_does_not_wait_for_rollouts_that_ignore_it() -> None:
    async def stubborn(task: int, context: Any) -> None:
        while True:
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                if task == 1:
                    return

    pool, _ = pool_of(stubborn)
    pool.submit(0, Task(spec=0, starting_inference_version=0))
    time.sleep(0.1)
    began = time.monotonic()
    pool.close(0.3)
    assert time.monotonic() - began < 2


def test_what_counts_as_async() -> None:
    async def function(task: int, context: Any) -> None: ...

    class Callable_:
        async def __call__(self, task: int, context: Any) -> None: ...

    assert is_async(function)
    assert is_async(functools.partial(function, context=None))
    assert is_async(Callable_())
    assert not is_async(lambda task, context: None)
    assert not is_async(sys.exit)


async def in_gather(error: BaseException) -> None:
    await asyncio.gather(asyncio.sleep(5), raising(error))


async def in_a_task(error: BaseException) -> None:
    await asyncio.create_task(raising(error))


async def in_a_task_left_alone(error: BaseException) -> None:
    asyncio.create_task(raising(error))  # noqa: RUF006
    await asyncio.sleep(5)


async def in_a_group(error: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(raising(error))
        group.create_task(asyncio.sleep(5))


async def in_a_callback(error: BaseException) -> None:
    asyncio.get_running_loop().call_soon(throw, error)
    await asyncio.sleep(5)


async def from_a_thread(error: BaseException) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(loop.call_soon_threadsafe, throw, error)
    await asyncio.sleep(5)


async def raising(error: BaseException) -> None:
    await asyncio.sleep(0.01)
    raise error


def throw(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "where", [in_gather, in_a_task, in_a_task_left_alone, in_a_group, in_a_callback, from_a_thread]
)
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_leaving_in_what_a_rollout_started_costs_that_rollout(
    server: Any, make_runner: Any, where: Any, error: BaseException
) -> None:
    """Failure H10: asyncio lets these two out of its loop; the loop and the other rollouts go on."""
    threads = set()

    async def rollout(task: int, context: Any) -> Any:
        threads.add(threading.get_ident())
        if task == 2:
            await where(error)
        await asyncio.sleep(0.03)
        return helpers.rollout(task, context)

    summary = make_runner(rollout).run()
    assert (summary.batches_filled, summary.failed) == (3, 1)
    assert summary.errors == {type(error).__name__: 1}
    assert len(threads) == 1


def test_leaving_in_a_child_task_comes_out_of_run(server: Any, make_runner: Any) -> None:
    error = SystemExit(3)

    async def rollout(task: int, context: Any) -> Any:
        await in_gather(error)

    with pytest.raises(SystemExit) as caught:
        make_runner(rollout, raise_on_rollout_failure=True).run()
    assert caught.value is error
    assert "raising" in [entry.name for entry in caught.traceback]


def test_a_rollout_that_stops_the_loop_does_not_stop_the_others(server: Any, make_runner: Any) -> None:
    async def rollout(task: int, context: Any) -> Any:
        if task == 2:
            asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return helpers.rollout(task, context)

    summary = make_runner(rollout).run()
    assert (summary.batches_filled, summary.failed) == (3, 0)


def test_what_outlives_its_rollout_does_not_end_the_loop(server: Any, make_runner: Any, caplog: Any) -> None:
    async def rollout(task: int, context: Any) -> Any:
        if task == 2:
            asyncio.get_running_loop().call_later(0.01, sys.exit, 3)
        else:
            await asyncio.sleep(0.02)
        return helpers.rollout(task, context)

    summary = make_runner(rollout).run()
    assert (summary.batches_filled, summary.failed) == (3, 0)
    assert re.search(r"left behind by task-\w+ raised SystemExit: 3; the event loop goes on", caplog.text)
