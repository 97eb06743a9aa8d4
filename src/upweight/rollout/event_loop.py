"""Runs `async def` rollouts, all on one event loop in a thread of its own: thousands in flight cost no threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from upweight.rollout.loop_thread import Hold, LoopThread
from upweight.rollout.models import Task
from upweight.rollout.workers import Outcome, RolloutCall


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: `async def`, a partial of one, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class EventLoopPool:
    """The same interface as `WorkerPool`, for a call whose rollout function is async. Used by one thread, but for `stacks`.

    A loop that is blocked can only be left behind: `replace_loop` goes on with another one. What rollouts share and what belongs
    to a loop, such as a lock or a client made outside the rollout, then belongs to the loop that is gone.
    """

    def __init__(self, call: RolloutCall, on_outcome: Callable[[Outcome], None]) -> None:
        self._call = call
        self._on_outcome = on_outcome
        self._thread: LoopThread | None = None

    def submit(self, attempt_id: int, task: Task[Any]) -> None:
        if self._thread is None:  # made by the first attempt: a run that ends before it has nothing to close
            self._thread = LoopThread(self._call, self._on_outcome)
            self._thread.start()
        self._thread.submit(attempt_id, task)

    def began(self, attempt_id: int) -> float | None:
        """Monotonic time at which the rollout was called; None before."""
        return None if self._thread is None else self._thread.began(attempt_id)

    def abandon(self, attempt_id: int) -> None:
        """Forget a running attempt; its rollout is cancelled."""
        if self._thread is not None:
            self._thread.forget(attempt_id)

    def hold(self) -> Hold | None:
        """What keeps the loop from everything else; to be asked regularly."""
        return None if self._thread is None else self._thread.hold()

    def replace_loop(self) -> None:
        """Forget all attempts, and cancel them once the loop is free; the next one starts a new loop."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()

    def stack(self) -> str:
        """Where the loop's thread is."""
        thread = self._thread
        return "" if thread is None else thread.stack()

    def stacks(self) -> dict[int, str]:
        """Where each running attempt waits, by its number."""
        thread = self._thread
        return {} if thread is None else thread.stacks()

    def close(self, timeout: float) -> None:
        """Cancel what runs and end the loop; a rollout that ignores its cancellation is left after `timeout` s."""
        if self._thread is not None:
            self._thread.end()
            self._thread.join(timeout)
