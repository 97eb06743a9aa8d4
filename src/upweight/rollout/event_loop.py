"""Runs `async def` rollouts, all on one event loop in a thread of its own: thousands in flight cost no threads.

Invariants
1. The outcome of an attempt is told exactly once, unless the attempt was abandoned: then never.
2. Whatever a rollout raises, `sys.exit()` and cancellation included, ends that rollout alone.
3. The loop's thread never keeps the interpreter alive.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from upweight.rollout.models import Task
from upweight.rollout.workers import Outcome, RolloutCall


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: `async def`, a partial of one, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class EventLoopPool:
    """The same interface as `WorkerPool`, for a call whose rollout function is async."""

    def __init__(self, call: RolloutCall, on_outcome: Callable[[Outcome], None]) -> None:
        self._call = call
        self._on_outcome = on_outcome
        self._lock = threading.Lock()
        self._running: dict[int, asyncio.Task[None] | None] = {}
        self._began: dict[int, float] = {}
        self._arrived: list[tuple[int, Task[Any]]] = []
        self._thread: threading.Thread | None = None

    def _ensure_loop(self) -> None:
        """Made by the first attempt: a run that ends before it has nothing to close."""
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run_loop, name="rollout-loop", daemon=True)
            self._thread.start()

    def submit(self, attempt_id: int, task: Task[Any]) -> None:
        self._ensure_loop()
        with self._lock:
            self._running[attempt_id] = None
            self._arrived.append((attempt_id, task))
            is_first = len(self._arrived) == 1
        if is_first:  # the others are taken along
            self._loop.call_soon_threadsafe(self._start_arrived)

    def began(self, attempt_id: int) -> float | None:
        """Monotonic time at which the rollout was called; None before."""
        with self._lock:
            return self._began.get(attempt_id)

    def abandon(self, attempt_id: int) -> None:
        """Forget a running attempt; its rollout is cancelled."""
        with self._lock:
            self._began.pop(attempt_id, None)
            work = self._running.pop(attempt_id, None)
        if work is not None:
            self._loop.call_soon_threadsafe(work.cancel)

    def stacks(self) -> dict[int, str]:
        """Where each running attempt waits, by its number."""
        with self._lock:
            running = dict(self._running)
        ident = self._thread.ident if self._thread is not None else None
        now = sys._current_frames().get(ident or 0)
        return {n: _stack_of(work.get_coro(), now) for n, work in running.items() if work is not None}

    def close(self, timeout: float) -> None:
        """Cancel what runs and end the loop; a rollout that ignores its cancellation is left after `timeout` s."""
        with self._lock:
            self._running.clear()
            self._began.clear()
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join(timeout)

    # ---- on the loop's thread --------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _end(self) -> None:
        left = [task for task in asyncio.all_tasks(self._loop) if not task.done()]
        for task in left:
            task.cancel()
        ending = asyncio.gather(*left, return_exceptions=True) if left else None
        if ending is None:
            self._loop.stop()
        else:
            ending.add_done_callback(lambda _: self._loop.stop())

    def _start_arrived(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for attempt_id, task in arrived:
            self._start(attempt_id, task)

    def _start(self, attempt_id: int, task: Task[Any]) -> None:
        work = self._loop.create_task(self._attempt(attempt_id, task))
        with self._lock:
            if attempt_id in self._running:
                self._running[attempt_id] = work
                self._began[attempt_id] = time.monotonic()
                return
        work.cancel()

    async def _attempt(self, attempt_id: int, task: Task[Any]) -> None:
        try:
            result = await self._call.rollout_fn(task=task.spec, context=self._call.context)
            outcome = Outcome(attempt_id, *self._call.check(task, result))
        except BaseException as error:  # noqa: BLE001 (sys.exit() in a rollout is a failed rollout too)
            outcome = Outcome.failed(attempt_id, error)
        with self._lock:
            self._began.pop(attempt_id, None)
            known = self._running.pop(attempt_id, self) is not self
        if known:
            self._on_outcome(outcome)


def _stack_of(waiting: Any, now: FrameType | None) -> str:
    """From the attempt down to what it awaits; of the one that runs, `now` is where its thread is."""
    if now is not None and getattr(waiting, "cr_running", False):
        return "".join(traceback.format_stack(now))
    lines: list[str] = []
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        lines += traceback.format_stack(frame, limit=1)
        waiting = waiting.cr_await
    return "".join(lines)
