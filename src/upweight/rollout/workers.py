"""Workers that run one attempt at a time each: a daemon thread, which calls the rollout itself or drives a child process.

Invariants
1. The outcome of an attempt is told exactly once, unless the attempt was abandoned: then never.
2. No thread here keeps the interpreter alive, and none is waited for while a rollout is inside it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from upweight.rollout.exceptions import presentable, traceback_of
from upweight.rollout.frames import current_frames
from upweight.rollout.models import Task
from upweight.rollout.validation import EncodedSample, encode_group


class Finished(NamedTuple):
    """What a rollout returned, and its samples encoded; None where results are not checked."""

    result: Any
    encoded: list[EncodedSample] | None


@dataclass(frozen=True)
class RolloutCall:
    """A rollout function with all it needs but the task. `group_size` None = results are not checked."""

    rollout_fn: Callable[..., Any]
    context: Any
    group_size: int | None = None

    def __call__(self, task: Task[Any]) -> Finished:
        result = self.rollout_fn(task=task.spec, context=self.context)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait_for(result))
        return self.check(task, result)

    def check(self, task: Task[Any], result: Any) -> Finished:
        """Raises `RolloutValidationError` for what cannot be uploaded."""
        if self.group_size is None:
            return Finished(result, None)
        return Finished(result, encode_group(task.id, result, self.group_size))


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


@dataclass
class Outcome:
    """Of one attempt: `error` with its traceback as text, or the result (`Finished` by its two parts)."""

    attempt_id: int
    result: Any = None
    encoded: list[EncodedSample] | None = None
    error: BaseException | None = None
    traceback: str = ""

    @classmethod
    def failed(cls, attempt_id: int, raised: BaseException) -> Outcome:
        """Of whatever a rollout raised, `sys.exit()` included; one of a worker process brings its traceback along."""
        error = presentable(raised)
        text = getattr(error, "remote_traceback", None) or traceback_of(raised)
        return cls(attempt_id, error=error, traceback=text)


class Executor(Protocol):
    """Runs attempts for one worker thread."""

    def prepare(self) -> None:
        """Start what a run needs, before the time limit begins; raises if that fails."""

    def run(self, task: Task[Any]) -> Finished: ...
    def kill(self) -> None:
        """Make a running `run` fail soon, where that is possible; called from another thread."""

    def close(self) -> None:
        """Called by the worker thread when it ends."""


class InThread:
    """Calls the rollout in the worker thread; a hanging one can only be abandoned."""

    def __init__(self, call: RolloutCall) -> None:
        self._call = call

    def prepare(self) -> None:
        """A thread is there at once."""

    def run(self, task: Task[Any]) -> Finished:
        return self._call(task)

    def kill(self) -> None:
        """A thread cannot be killed."""

    def close(self) -> None:
        """Nothing is held."""


class _Worker(threading.Thread):
    def __init__(self, executor: Executor, pool: WorkerPool) -> None:
        super().__init__(name="rollout-worker", daemon=True)
        self.executor = executor
        self.inbox: SimpleQueue[tuple[int, Task[Any]] | None] = SimpleQueue()
        self._pool = pool

    def run(self) -> None:
        try:
            while (job := self.inbox.get()) is not None:
                if not self._pool.finish(self, self._attempt(*job)):
                    return
        finally:
            self.executor.close()

    def _attempt(self, attempt_id: int, task: Task[Any]) -> Outcome:
        try:
            self.executor.prepare()
            self._pool.note_begin(attempt_id)
            return Outcome(attempt_id, *self.executor.run(task))
        except BaseException as error:  # noqa: BLE001 (sys.exit() in a rollout is a failed rollout too)
            return Outcome.failed(attempt_id, error)


class WorkerPool:
    """Starts workers as needed and keeps idle ones; the caller limits how many attempts run at once."""

    def __init__(self, make_executor: Callable[[], Executor], on_outcome: Callable[[Outcome], None]) -> None:
        self._make_executor = make_executor
        self._on_outcome = on_outcome
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: dict[int, _Worker] = {}
        self._began: dict[int, float] = {}
        self._closed = False

    def submit(self, attempt_id: int, task: Task[Any]) -> None:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self._make_executor(), self)
            worker.start()
        with self._lock:
            self._busy[attempt_id] = worker
        worker.inbox.put((attempt_id, task))

    def began(self, attempt_id: int) -> float | None:
        """Monotonic time at which the rollout was called; None while its worker is starting."""
        with self._lock:
            return self._began.get(attempt_id)

    def note_begin(self, attempt_id: int) -> None:
        with self._lock:
            if attempt_id in self._busy:
                self._began[attempt_id] = time.monotonic()

    def abandon(self, attempt_id: int) -> None:
        """Forget a running attempt; its worker ends, at once if it can be killed."""
        with self._lock:
            self._began.pop(attempt_id, None)
            worker = self._busy.pop(attempt_id, None)
        if worker is not None:
            worker.executor.kill()

    def stacks(self) -> dict[int, str]:
        """Where each running attempt is, by its number: the stack of its thread."""
        with self._lock:
            busy = {attempt_id: worker.ident for attempt_id, worker in self._busy.items()}
        frames = current_frames()
        return {n: "".join(traceback.format_stack(frames[ident])) for n, ident in busy.items() if ident in frames}

    def finish(self, worker: _Worker, outcome: Outcome) -> bool:
        """Called by workers; False tells the worker to end."""
        with self._lock:
            self._began.pop(outcome.attempt_id, None)
            if self._busy.pop(outcome.attempt_id, None) is None:
                return False
            if not self._closed:
                self._idle.append(worker)
        self._on_outcome(outcome)
        return not self._closed

    def close(self, timeout: float) -> None:
        """Abandon what runs; wait up to `timeout` s for idle workers to end."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            running = list(self._busy)
        for attempt_id in running:
            self.abandon(attempt_id)
        for worker in idle:
            worker.inbox.put(None)
        for worker in idle:
            worker.join(timeout)
