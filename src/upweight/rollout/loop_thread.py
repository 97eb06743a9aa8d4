"""One event loop in a thread of its own, on which attempts run as tasks.

Invariants
1. The outcome of an attempt is told exactly once, unless the attempt was forgotten: then never.
2. Whatever a rollout raises, in its coroutine or in tasks and callbacks that it started, ends that rollout alone: asyncio lets
   `SystemExit` and `KeyboardInterrupt` of tasks and callbacks out of `run_forever`, and the loop is run again.
3. The thread never keeps the interpreter alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from upweight.rollout.exceptions import in_words
from upweight.rollout.frames import current_frames
from upweight.rollout.models import Task
from upweight.rollout.workers import Outcome, RolloutCall

logger = logging.getLogger(__name__)

SAMPLED_EVERY_S = 0.05


class Owner(NamedTuple):
    """The attempt that a task or callback belongs to."""

    attempt_id: int
    task_id: str


_owner: ContextVar[Owner | None] = ContextVar("rollout_attempt", default=None)  # tasks and callbacks inherit it


class Hold(NamedTuple):
    """One callback that has not given the loop back for `seconds`; `owner` None = it belongs to no rollout."""

    owner: Owner | None
    seconds: float

    def in_words(self) -> str:
        by = "a callback of no rollout" if self.owner is None else self.owner.task_id
        return f"the event loop, blocked for {self.seconds:.0f} s by {by}"


@dataclass
class _Running:
    """An attempt given to the loop; `began` is a monotonic time."""

    task: Task[Any]
    work: asyncio.Task[None] | None = None
    began: float | None = None


class LoopThread(threading.Thread):
    """`submit` and all else may be called from any thread; `on_outcome` is called on this one."""

    def __init__(self, call: RolloutCall, on_outcome: Callable[[Outcome], None]) -> None:
        super().__init__(name="rollout-loop", daemon=True)
        self._call = call
        self._on_outcome = on_outcome
        self._lock = threading.Lock()
        self._running: dict[int, _Running] = {}
        self._arrived: list[int] = []
        self._is_over = False
        self._held: Any = None
        self._held_since = self._sampled = 0.0
        self._loop = asyncio.new_event_loop()

    def submit(self, attempt_id: int, task: Task[Any]) -> None:
        with self._lock:
            self._running[attempt_id] = _Running(task)
            self._arrived.append(attempt_id)
            is_first = len(self._arrived) == 1
        if is_first:  # the others are taken along
            self._loop.call_soon_threadsafe(self._start_arrived)

    def began(self, attempt_id: int) -> float | None:
        """Monotonic time at which the rollout was called; None before."""
        with self._lock:
            running = self._running.get(attempt_id)
            return None if running is None else running.began

    def forget(self, attempt_id: int) -> None:
        """Tell nothing of this attempt any more, and cancel its rollout."""
        running = self._pop(attempt_id)
        if running is not None and running.work is not None:
            self._loop.call_soon_threadsafe(running.work.cancel)

    def end(self) -> None:
        """Forget and cancel all; the thread ends once they are done, which a rollout may delay for ever."""
        with self._lock:
            self._running.clear()
            self._arrived.clear()
        if self.is_alive():
            with contextlib.suppress(RuntimeError):  # it has ended and closed its loop meanwhile
                self._loop.call_soon_threadsafe(self._cancel_all)

    def _pop(self, attempt_id: int) -> _Running | None:
        with self._lock:
            return self._running.pop(attempt_id, None)

    # ---- what another thread can see -------------------------------------------------------------------------------

    def hold(self) -> Hold | None:
        """The callback that the loop is inside of, if it was the same at the last look; to be called regularly, by one thread."""
        now = time.monotonic()
        if now - self._sampled >= SAMPLED_EVERY_S:
            self._sampled = now
            handle = _callback_in(_outwards(self._frame()))
            if handle is not self._held:
                self._held, self._held_since = handle, now
        return None if self._held is None else Hold(_owner_of(self._held), now - self._held_since)

    def stack(self) -> str:
        """Where the thread is."""
        frame = self._frame()
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def stacks(self) -> dict[int, str]:
        """Where each attempt is, by its number: what it awaits, or where the thread is."""
        with self._lock:
            works = {number: running.work for number, running in self._running.items()}
        now = self._frame()
        return {n: _stack_of(work.get_coro(), now) for n, work in works.items() if work is not None}

    def _frame(self) -> FrameType | None:
        return current_frames().get(self.ident or 0)

    # ---- on this thread --------------------------------------------------------------------------------------------

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_over:  # a rollout may also have stopped the loop
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001 (sys.exit() in a task or callback is a failed rollout too)
                self._settle_escaped(error)
        try:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        except BaseException as error:  # noqa: BLE001 (of the `finally` of some generator; nobody waits for it)
            logger.warning("A rollout's async generator failed as it was closed: %s", in_words(error))
        self._loop.close()

    def _settle_escaped(self, error: BaseException) -> None:
        """The rollout that owns the callback fails, now: it may never look at the task that raised."""
        frames = [frame for frame, _ in traceback.walk_tb(BaseException.__getattribute__(error, "__traceback__"))]
        owner = _owner_of(_callback_in(reversed(frames)))
        running = None if owner is None else self._pop(owner.attempt_id)
        if owner is None or running is None:
            of = "of no rollout" if owner is None else f"left behind by {owner.task_id}"
            logger.warning("A task or callback %s raised %s; the event loop goes on", of, in_words(error))
            return
        if running.work is not None:
            running.work.cancel()
        self._on_outcome(Outcome.failed(owner.attempt_id, error))

    def _cancel_all(self) -> None:
        left = [task for task in asyncio.all_tasks(self._loop) if not task.done()]
        for task in left:
            task.cancel()
        if left:
            asyncio.gather(*left, return_exceptions=True).add_done_callback(lambda _: self._stop_loop())
        else:
            self._stop_loop()

    def _stop_loop(self) -> None:
        self._is_over = True
        self._loop.stop()

    def _start_arrived(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
            starting = [(number, self._running[number]) for number in arrived if number in self._running]
        for number, running in starting:
            work = running.work = self._loop.create_task(self._attempt(number, running))
            with self._lock:
                is_forgotten = number not in self._running
            if is_forgotten:
                work.cancel()

    async def _attempt(self, attempt_id: int, running: _Running) -> None:
        _owner.set(Owner(attempt_id, str(running.task.id)))
        running.began = time.monotonic()
        try:
            result = await self._call.rollout_fn(task=running.task.spec, context=self._call.context)
            outcome = Outcome(attempt_id, *self._call.check(running.task, result))
        except BaseException as error:  # noqa: BLE001 (sys.exit() in a rollout is a failed rollout too)
            outcome = Outcome.failed(attempt_id, error)
        if self._pop(attempt_id) is not None:
            self._on_outcome(outcome)


# ---- frames of this and other threads ------------------------------------------------------------------------------

_RUN_CALLBACK = asyncio.Handle._run.__code__


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _callback_in(frames: Iterator[FrameType]) -> Any:
    """The handle of the innermost callback that these frames, innermost first, are inside of; None = no loop runs one."""
    return next((frame.f_locals.get("self") for frame in frames if frame.f_code is _RUN_CALLBACK), None)


def _owner_of(handle: Any) -> Owner | None:
    context = getattr(handle, "_context", None)
    return None if context is None else context.get(_owner)


def _stack_of(waiting: Any, now: FrameType | None) -> str:
    """From the attempt down to what it awaits; of the one that runs, `now` is where its thread is."""
    if now is not None and getattr(waiting, "cr_running", False):
        return "".join(traceback.format_stack(now))
    lines: list[str] = []
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        lines += traceback.format_stack(frame, limit=1)
        waiting = waiting.cr_await
    return "".join(lines)
