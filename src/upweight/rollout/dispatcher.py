"""Tasks in, one result per task out; retries, time limits and the death of workers are handled here.

Invariants
1. Each task gets exactly one `RolloutResult` or `RolloutException`.
2. At most `concurrent_workers` attempts run at once; a task waiting for its retry occupies no worker.
3. If this thread dies, a `Broken` message with its exception comes out.
4. The time that one async rollout keeps the event loop from the others is not theirs: it counts against no limit but its own.
5. A group that reports a version beyond the known ones waits for the next poll; if that tells none so new, it is a failed attempt.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from queue import Empty, Full, Queue, SimpleQueue
from typing import Any

from upweight.rollout.config import ExecutorType
from upweight.rollout.event_loop import EventLoopPool, is_async
from upweight.rollout.exceptions import (
    EventLoopBlocked,
    RolloutTimeout,
    WorkerDied,
    WorkerPoolBroken,
    in_words,
    reason_of,
)
from upweight.rollout.loop_thread import Hold
from upweight.rollout.messages import Broken
from upweight.rollout.models import RolloutException, RolloutResult, SampleGroup, Task
from upweight.rollout.outage import PacedWarnings, shown
from upweight.rollout.processes import InProcess, pickled_call
from upweight.rollout.ray_actors import ray_executors
from upweight.rollout.reported import Reported, newest_reported, too_new
from upweight.rollout.tracker import Served
from upweight.rollout.workers import Executor, InThread, Outcome, RolloutCall, WorkerPool

logger = logging.getLogger(__name__)

DEFAULT_QUEUE_GET_TIMEOUT = 0.1
MAX_BACKOFF_S = 5.0
HELD_S = 0.2  # an event loop that is kept this long by one callback holds up the other rollouts,
TOLD_HOLD_S = 1.0  # this long is worth telling,
MAX_HOLD_S = (
    5.0  # and this long by a rollout that was given up, or `rollout_timeout` if that is less, it is left behind
)
START_LIMIT_S = 120.0  # a worker may take this long to start before the time limit of a rollout begins


@dataclass
class _Attempt:
    """`number` counts from 0; `started` is a monotonic time; `reasons` of the attempts that failed.

    `held_up`: seconds since it began in which another one kept the event loop.
    """

    task: Task[Any]
    number: int = 0
    started: float = 0.0
    held_up: float = 0.0
    version: int | None = None
    reasons: tuple[str, ...] = ()


@dataclass
class _Doubtful:
    """A group that reports a version not known yet; the poll of number `decided_at` began after it was finished."""

    attempt: _Attempt
    outcome: Outcome
    reported: Reported
    decided_at: int


class RolloutDispatcher(threading.Thread):
    """Runs `rollout_fn` for each `Task` of `input_queue` and puts its `RolloutResult` on `output_queue`.

    `current_version` gives the version that an attempt starting now is stamped with; default: the task's own.
    `served` gives the versions known, against which those that samples report are checked; None = they are not.
    `group_size` None = results are passed on unchecked. Times are in seconds.
    """

    def __init__(
        self,
        rollout_fn: Callable[..., Any],
        context: Any,
        input_queue: Queue[Any],
        output_queue: Queue[Any],
        concurrent_workers: int,
        num_rollout_retries: int,
        raise_on_rollout_failure: bool,
        *,
        executor_type: ExecutorType = ExecutorType.THREAD,
        group_size: int | None = None,
        rollout_timeout: float | None = None,
        retry_backoff: float = 0.05,
        max_pool_restarts: int = 3,
        process_start_method: str = "spawn",
        current_version: Callable[[], int | None] = lambda: None,
        served: Callable[[], Served | None] = lambda: None,
    ) -> None:
        super().__init__(name="rollout-dispatcher", daemon=True)
        call = RolloutCall(rollout_fn, context, group_size)
        self._pool: WorkerPool | EventLoopPool
        self._loop: EventLoopPool | None = None
        if executor_type is ExecutorType.THREAD and is_async(rollout_fn):
            self._pool = self._loop = EventLoopPool(call, self._tell)
        else:
            self._pool = WorkerPool(_executor_factory(call, executor_type, process_start_method), self._tell)
        self._input, self._output = input_queue, output_queue
        self._workers = concurrent_workers
        self._max_retries = num_rollout_retries
        self._raise = raise_on_rollout_failure
        self._timeout = rollout_timeout
        self._backoff = retry_backoff
        self._max_restarts = max_pool_restarts
        self._current_version = current_version
        self._served = served
        self._doubtful: list[_Doubtful] = []
        self._stopping = threading.Event()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._is_woken = False
        self._ids = itertools.count()
        self._waiting: deque[_Attempt] = deque()
        self._delayed: list[tuple[float, int, _Attempt]] = []
        self._running: dict[int, _Attempt] = {}
        self._death_codes: list[int | None] = []
        self._hold: Hold | None = None
        self._hold_booked = 0.0
        self._warnings = PacedWarnings(logger)

    def stop(self) -> None:
        """Start nothing more, abandon what runs."""
        self._stopping.set()

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_doubtful(self) -> int:
        """Groups that wait until the version they report is known."""
        return len(self._doubtful)

    @property
    def blocked(self) -> str:
        """The event loop and what blocks it, in words; empty as long as it is free."""
        hold = self._hold
        return hold.in_words() if hold is not None and hold.seconds >= TOLD_HOLD_S else ""

    def oldest(self, most: int) -> dict[str, float]:
        """The rollouts that run longest: task ids → seconds since their attempt started."""
        now = time.monotonic()
        first = list(islice(self._running.values(), most))  # in the order of their starts, and at once
        return {str(attempt.task.id): now - attempt.started for attempt in first}

    def stacks(self, most: int = 20) -> str:
        """Where the oldest running rollouts are, as text."""
        now, stacks = time.monotonic(), self._pool.stacks()
        running = list(self._running.items())  # in the order of their starts, and at once: this thread is another one
        parts = [
            f"{attempt.task.id}, attempt {attempt.number + 1}, {now - attempt.started:.0f} s:\n{stacks.get(number, '')}"
            for number, attempt in running[:most]
        ]
        if len(running) > most:
            parts.append(f"… and {len(running) - most} more\n")
        if self._loop is not None and (blocked := self.blocked):
            parts.insert(0, f"{blocked}:\n{self._loop.stack()}")
        return "".join(parts)

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._receive()
                self._settle_outcomes()
                self._settle_doubtful()
                self._watch_loop()
                self._expire()
                self._leave_blocked_loop()
                self._warnings.flush()
                self._start_attempts()
        except BaseException as error:  # the run must learn of it, or it would wait for ever
            logger.exception("The rollout dispatcher died")
            self._output.put(Broken(error))
            if not isinstance(error, Exception):
                raise
        finally:
            self._warnings.flush(is_last=True)
            self._pool.close(timeout=2.0)

    def _tell(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)
        if self._is_woken:  # it has not looked since it was last told
            return
        self._is_woken = True
        with contextlib.suppress(Full):  # only to wake the loop sooner; it looks every 0.1 s anyway
            self._input.put_nowait(None)

    def _receive(self) -> None:
        timeout = DEFAULT_QUEUE_GET_TIMEOUT
        if self._delayed:
            timeout = min(timeout, max(0.0, self._delayed[0][0] - time.monotonic()))
        with contextlib.suppress(Empty):
            task = self._input.get(timeout=timeout)
            while True:
                if task is not None:
                    self._waiting.append(_Attempt(task))
                task = self._input.get_nowait()

    def _start_attempts(self) -> None:
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            self._waiting.append(heapq.heappop(self._delayed)[2])
        while self._waiting and len(self._running) < self._workers:
            attempt = self._waiting.popleft()
            version = self._current_version()
            attempt.version = attempt.task.starting_inference_version if version is None else version
            attempt.started, attempt.held_up = time.monotonic(), 0.0
            attempt_id = next(self._ids)
            self._running[attempt_id] = attempt
            self._pool.submit(attempt_id, attempt.task)

    def _settle_outcomes(self) -> None:
        self._is_woken = False
        with contextlib.suppress(Empty):
            while True:
                outcome = self._outcomes.get_nowait()
                attempt = self._running.pop(outcome.attempt_id, None)
                if attempt is None:
                    continue  # it was abandoned
                if outcome.error is None:
                    self._death_codes.clear()
                    self._succeeded(attempt, outcome)
                else:
                    self._note_death(outcome.error)
                    self._failed(attempt, outcome.error, outcome.traceback)

    def _succeeded(self, attempt: _Attempt, outcome: Outcome) -> None:
        served = None if outcome.encoded is None else self._served()
        reported = None if served is None else newest_reported(outcome.result)
        if served is None or reported is None or reported.version <= served.newest:
            self._hand_over(attempt, outcome)
        else:  # the job may have published it since it was last asked
            self._doubtful.append(_Doubtful(attempt, outcome, reported, served.polls + 2))

    def _settle_doubtful(self) -> None:
        served = self._served() if self._doubtful else None
        if served is None:
            return
        doubtful, self._doubtful = self._doubtful, []
        for group in doubtful:
            if group.reported.version <= served.newest:
                self._hand_over(group.attempt, group.outcome)
            elif served.polls >= group.decided_at:
                error = too_new(group.attempt.task.id, group.reported, served.newest)
                self._failed(group.attempt, error, str(error))
            else:
                self._doubtful.append(group)

    def _hand_over(self, attempt: _Attempt, outcome: Outcome) -> None:
        self._output.put(
            RolloutResult(
                attempt.task,
                outcome.result,
                attempt.version,
                retries=attempt.number,
                encoded=outcome.encoded,
                reasons=attempt.reasons,
            )
        )

    def _expire(self) -> None:
        if self._timeout is None:
            return
        now = time.monotonic()
        for attempt_id, attempt in list(self._running.items()):
            began = self._pool.began(attempt_id)
            elapsed = now - (began or attempt.started) - attempt.held_up
            limit = self._timeout + (0.0 if began else START_LIMIT_S)
            if elapsed > limit:
                del self._running[attempt_id]
                self._pool.abandon(attempt_id)
                message = f"Task {attempt.task.id}: the rollout took longer than {self._timeout} s ({elapsed:.1f} s)"
                if self._holder == attempt_id:
                    message += " and blocks the event loop"
                self._failed(attempt, RolloutTimeout(message), message)

    @property
    def _holder(self) -> int | None:
        """The attempt that keeps the event loop."""
        hold = self._hold
        return None if hold is None or hold.owner is None or hold.seconds < HELD_S else hold.owner.attempt_id

    def _watch_loop(self) -> None:
        if self._loop is None:
            return
        self._hold = hold = self._loop.hold()
        seconds = 0.0 if hold is None or hold.seconds < HELD_S else hold.seconds
        more = seconds - self._hold_booked if seconds > self._hold_booked else 0.0
        self._hold_booked = seconds
        for attempt_id, attempt in self._running.items() if more else ():
            if attempt_id != self._holder and self._loop.began(attempt_id):
                attempt.held_up += more

    def _leave_blocked_loop(self) -> None:
        """Once the rollout that blocks it was given up, all others start again on another loop: their attempts are not used up."""
        hold = self._hold
        if self._loop is None or hold is None or self._timeout is None:
            return
        if hold.owner is not None and hold.owner.attempt_id in self._running:
            return
        if hold.seconds < (self._timeout if hold.owner is None else min(self._timeout, MAX_HOLD_S)):
            return
        where, begun = self._loop.stack(), {n for n in self._running if self._loop.began(n)}
        self._loop.replace_loop()
        self._hold = None
        self._settle_outcomes()  # of those that were just in time
        left = dict(self._running)
        self._running.clear()
        logger.warning(
            "Waited for %s; %d other rollouts go on with another loop. An async rollout must await, not block; one that "
            "blocks may be a plain function, which gets a thread. The loop is at:\n%s",
            *(hold.in_words(), len(left), where),
        )
        lost = begun if hold.owner is None else set()  # for if nobody failed, this might go on for ever
        for attempt_id in lost & left.keys():
            message = f"Task {left[attempt_id].task.id}: stood behind {hold.in_words()}"
            self._failed(left[attempt_id], EventLoopBlocked(message), f"{message}\n{where}")
        self._waiting.extendleft(left[attempt_id] for attempt_id in reversed(left) if attempt_id not in lost)

    def _note_death(self, error: BaseException) -> None:
        if isinstance(error, WorkerPoolBroken):
            raise error
        if not isinstance(error, WorkerDied):
            return
        self._death_codes.append(error.exit_code)
        if len(self._death_codes) > self._max_restarts:
            raise WorkerPoolBroken(
                f"{len(self._death_codes)} worker processes died in a row, with exit codes {self._death_codes}; "
                f"the last one: {error}"
            )

    def _failed(self, attempt: _Attempt, error: BaseException, text: str) -> None:
        task, number, reasons = attempt.task, attempt.number, (*attempt.reasons, reason_of(error))
        if number < self._max_retries:
            delay = min(MAX_BACKOFF_S, self._backoff * 2 ** min(number, 16)) * random.uniform(0.8, 1.2)
            logger.info("Task %s: attempt %d failed (%s); next in %.2f s", task.id, number + 1, in_words(error), delay)
            retry = _Attempt(task, number + 1, reasons=reasons)
            heapq.heappush(self._delayed, (time.monotonic() + delay, next(self._ids), retry))
        elif self._raise:
            self._output.put(RolloutException(error, text, task, retries=number, reasons=reasons))
        else:
            self._warnings.warn(f"Task {task.id}: failed after {number + 1} attempts ({shown(error)})")
            self._output.put(
                RolloutResult(
                    task, SampleGroup(is_rejected=True), attempt.version, error=error, retries=number, reasons=reasons
                )
            )


def _executor_factory(call: RolloutCall, kind: ExecutorType, start_method: str) -> Callable[[], Executor]:
    if kind is ExecutorType.THREAD:
        return lambda: InThread(call)
    if kind is ExecutorType.PROCESS:
        payload = pickled_call(call)
        return lambda: InProcess(payload, start_method)
    return ray_executors(call)
