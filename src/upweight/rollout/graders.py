"""Graders in worker processes with a time limit, so that no answer of a model can hang or crash a run.

Invariants
1. A grade comes back within its time limit, plus the wait for a free worker and, after a death, for that worker's start.
2. A worker that hangs, dies or runs away is killed with all it started and replaced: the pool keeps its size. What a grader
   started in a session of its own is found (on Linux) as long as the worker, or what it started, still lives.
3. A hanging grader outlives neither its limit by long nor this process: the child ends itself, whatever holds its interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from upweight.errors import RolloutError
from upweight.rollout.config import DAY_S
from upweight.rollout.exceptions import in_words, traceback_of
from upweight.rollout.process_tree import kill_group, kill_tree

logger = logging.getLogger(__name__)

MAX_RESULT_BYTES = 1 << 20
SHOWN_CHARS = 200
OWN_END_S = 2.0  # after its limit a child has this long to be killed before it ends itself
EXIT_GRACE_S = 2.0


class GraderError(RolloutError):
    """The grader raised, returned something that cannot be sent, or its worker cannot be started."""


@dataclass(frozen=True)
class GraderCounts:
    """What became of the grades; `total` is the sum of the others."""

    graded: int = 0
    timed_out: int = 0
    died: int = 0
    raised: int = 0

    @property
    def total(self) -> int:
        return self.graded + self.timed_out + self.died + self.raised


def _check_limits(workers: int, **seconds: float) -> None:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers is {workers!r}; it must be a whole number of processes from 1")
    for name, value in seconds.items():
        if not isinstance(value, int | float) or not 0 < value <= DAY_S:  # NaN is in no range
            raise ValueError(f"{name} is {value!r}; it must be above 0 and up to {DAY_S} seconds")


class GraderPool:
    """Calls `fn(*args, **kw)` in `workers` processes; a call that fails scores `score_on_failure`.

    Use as a context manager, or `close()` it. Threads call `grade`, coroutines await `grade_async`. Sent to the worker processes
    of a run (`executor_type` "process" or "ray"), each makes itself one grader process when it first grades.

    Args:
        fn: picklable (at the top of a module); it and its arguments are sent to the workers.
        timeout: seconds for one grade, not counting the wait for a free worker.
        raise_on_error: an exception of `fn` comes out as `GraderError` instead of a score.
        start_timeout: seconds for a worker to start and import what `fn` needs.

    Raises:
        TypeError: `fn` cannot be pickled.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        workers: int = 2,
        timeout: float = 10.0,
        score_on_failure: Any = 0.0,
        raise_on_error: bool = False,
        start_timeout: float = 60.0,
    ) -> None:
        _check_limits(workers, timeout=timeout, start_timeout=start_timeout)
        try:
            self._payload = pickle.dumps(fn)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"the grader {fn!r} cannot be sent to a worker process: {error}; define it at the top of a module"
            ) from error
        self._timeout, self._start_timeout = timeout, start_timeout
        self._score_on_failure, self._raise = score_on_failure, raise_on_error
        self._make_live(workers)
        self._start_children()

    def _make_live(self, workers: int) -> None:
        self._workers = workers
        self._changed = threading.Condition()
        self._counts = GraderCounts()
        self._closed = False
        self._children: set[_Child] | None = None
        self._free: deque[_Child] = deque()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grader")

    def _start_children(self) -> None:
        with self._changed:
            if self._children is None and not self._closed:
                self._children = {_Child(self._payload, self._timeout) for _ in range(self._workers)}
                self._free.extend(self._children)

    # -- grading

    def grade(self, *args: Any, name: str | None = None, **kw: Any) -> Any:
        """What the grader returns, or `score_on_failure`; `name` is how the log calls the sample.

        Raises:
            GraderError: see `raise_on_error`; also when no worker can be started at all.
            RuntimeError: the pool is closed.
        """
        self._start_children()
        child = self._take()
        try:
            child.wait_ready(self._start_timeout)
            began = time.monotonic()
            outcome = child.call(args, kw, self._timeout)
            seconds = time.monotonic() - began
        except BaseException:  # interrupted: the child may still be at work
            self._give_back(child, keep=False)
            raise
        self._give_back(child, keep=outcome.is_usable)
        named = "" if outcome.kind == "graded" else name or _shown(args, kw)
        return self._settle(outcome, named, seconds)

    async def grade_async(self, *args: Any, name: str | None = None, **kw: Any) -> Any:
        """As `grade`, without blocking the event loop."""
        call = functools.partial(self.grade, *args, name=name, **kw)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    @property
    def counts(self) -> GraderCounts:
        with self._changed:
            return self._counts

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        with self._changed:
            return [child.pid for child in self._children or ()]

    def _settle(self, outcome: _Outcome, name: str, seconds: float) -> Any:
        with self._changed:
            if self._closed and outcome.kind == "died":
                raise RuntimeError("the grader pool is closed")
            self._counts = replace(self._counts, **{outcome.kind: getattr(self._counts, outcome.kind) + 1})
        if outcome.kind == "graded":
            return outcome.value
        if outcome.kind == "timed_out":
            logger.warning("Grading %s took longer than %.1f s; its worker was killed and replaced", name, seconds)
        elif outcome.kind == "died":
            logger.warning("Grading %s ended its worker (exit code %s); it was replaced", name, outcome.value)
        elif self._raise:
            raise GraderError(f"grading {name} failed: {outcome.value}")
        else:
            logger.warning("Grading %s failed: %s", name, outcome.value)
        return self._score_on_failure

    # -- workers

    def _take(self) -> _Child:
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            self._refuse_closed()
            return self._free.popleft()

    def _give_back(self, child: _Child, *, keep: bool) -> None:
        if not keep:
            child.kill()
        with self._changed:
            if not keep and self._children is not None:
                self._children.discard(child)
                if not self._closed:
                    child = _Child(self._payload, self._timeout)
                    self._children.add(child)
            if not self._closed:
                self._free.append(child)
            self._changed.notify()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the grader pool is closed")

    # -- life

    def close(self) -> None:
        """Kill the workers; grades under way raise `RuntimeError`. Idempotent."""
        with self._changed:
            self._closed = True
            children, self._children = self._children or set(), None
            self._free.clear()
            self._changed.notify_all()
        for child in children:
            child.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """What travels: grader and settings. A worker process, which runs one rollout at a time, gets one grader of its own."""
        kept = ("_payload", "_timeout", "_start_timeout", "_score_on_failure", "_raise")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_live(1)


@dataclass(frozen=True)
class _Outcome:
    """`kind` is a field of `GraderCounts`; `value` is the result, the traceback or the exit code."""

    kind: str
    value: Any = None

    @property
    def is_usable(self) -> bool:
        return self.kind in ("graded", "raised")


class _Child:
    """One worker process; used by one thread at a time, but `kill` may come from any."""

    def __init__(self, payload: bytes, timeout: float) -> None:
        mp = multiprocessing.get_context("spawn")
        self._pipe, theirs = mp.Pipe()
        self._process = mp.Process(target=child_main, args=(theirs, payload, timeout), name="grader", daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._is_ready = False
        self._burial = threading.Lock()
        self._exit_code: int | None = None

    def wait_ready(self, timeout: float) -> None:
        if self._is_ready:
            return
        try:
            if not self._pipe.poll(timeout):
                raise GraderError(f"a grader worker did not start within {timeout} s")
            problem = self._pipe.recv()
        except (EOFError, OSError):
            raise GraderError(
                "a grader worker ended while it started; a script needs `if __name__ == '__main__':` around its work"
            ) from None
        if problem is not None:
            raise GraderError(f"a grader worker cannot load the grader: {problem}")
        self._is_ready = True

    def call(self, args: tuple[Any, ...], kw: dict[str, Any], timeout: float) -> _Outcome:
        try:
            self._pipe.send((args, kw))
            if not self._pipe.poll(timeout):
                return _Outcome("timed_out")
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            self.kill()
            return _Outcome("died", self._exit_code)
        try:
            return _Outcome(*pickle.loads(answer))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a foreign class raises while being made)
            return _Outcome("raised", f"the result cannot be unpickled: {in_words(error)}")

    def kill(self) -> None:
        """End the process and what it started."""
        with self._burial:
            if self._pipe.closed:
                return
            self._process.join(0.05)  # one that died by itself keeps its exit code
            if self._process.exitcode is None:
                kill_tree(self.pid)
            else:  # its number may be another's by now, but not while a group bears it
                kill_group(self.pid)
            self._process.kill()
            self._process.join(EXIT_GRACE_S)
            self._exit_code = self._process.exitcode
            self._pipe.close()
            if self._exit_code is not None:
                self._process.close()


def child_main(pipe: Connection, payload: bytes, timeout: float) -> None:
    """Loop of a worker: ends when the pool closes its pipe or dies, and by itself when a grade is far over its limit."""
    with contextlib.suppress(OSError, AttributeError):  # the latter where there are no sessions
        os.setsid()  # what a grader starts is killed with it; Ctrl-C is for the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        fn = pickle.loads(payload)
    except BaseException as error:  # noqa: BLE001 (told to the parent, whatever the grader's module raises)
        pipe.send(in_words(error))
        return
    pipe.send(None)
    with open(os.devnull, "w") as nowhere:
        while True:
            try:
                args, kw = pipe.recv()
            except EOFError:
                return
            # A thread in C, which no loop of the interpreter or of a library can hold up.
            faulthandler.dump_traceback_later(timeout + OWN_END_S, exit=True, file=nowhere)
            outcome = _graded(fn, args, kw)
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(outcome)


def _graded(fn: Callable[..., Any], args: tuple[Any, ...], kw: dict[str, Any]) -> bytes:
    try:
        data = pickle.dumps(("graded", fn(*args, **kw)))
        pickle.loads(data)  # here, within the time limit, and not first in the run's process
        if len(data) <= MAX_RESULT_BYTES:
            return data
        problem = f"the result takes {len(data)} bytes, the most is {MAX_RESULT_BYTES}"
    except BaseException as error:  # noqa: BLE001 (told to the parent; sys.exit() in a grader must not end the worker)
        problem = traceback_of(error, limit=-3).strip()
    return pickle.dumps(("raised", problem))


def _shown(args: tuple[Any, ...], kw: dict[str, Any]) -> str:
    try:
        text = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kw.items())])
    except Exception:  # noqa: BLE001 (whatever a foreign `__repr__` raises)
        text = f"arguments that cannot be shown, of types {[type(arg).__name__ for arg in (*args, *kw.values())]}"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
