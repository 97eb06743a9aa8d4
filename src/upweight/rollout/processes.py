"""A rollout executor in a child process: function, context and clients are sent once, then tasks one by one."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from upweight.rollout.exceptions import RemoteError, WorkerDied, WorkerPoolBroken, in_words, presentable, traceback_of
from upweight.rollout.models import Task
from upweight.rollout.workers import Finished, RolloutCall

_starting = threading.Lock()  # with fork, a child started at the same time would inherit this child's pipe end
EXIT_GRACE_S = 1.0
_HELD = (signal.SIGINT, signal.SIGTERM)
_children: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register  # runs before the exit of `multiprocessing`, which would ask with SIGTERM and wait for ever
def _kill_children() -> None:
    for process in list(_children):
        process.kill()


def pickled_call(call: RolloutCall, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes:
    """The call as it is sent to children.

    Raises:
        TypeError: naming the part that cannot be pickled.
    """
    parts = {
        "the rollout function": call.rollout_fn,
        "the HTTP client factory": getattr(getattr(call.context, "api_client", None), "_factory", None),
        "the rollout context": call.context,
    }
    for name, part in parts.items():
        try:
            dumps(part)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{name} {part!r} cannot be sent to a worker process: {error}; define it at the top of a module, "
                "or use executor_type='thread'"
            ) from error
    return dumps(call)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A child started inside inherits the block: a Ctrl-C or SIGTERM to the whole group waits until it can leave it to its parent."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would be started inside, and unblock them
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class InProcess:
    """Drives one child; a dead child is replaced when the next attempt comes."""

    def __init__(self, payload: bytes, start_method: str) -> None:
        self._payload = payload
        self._mp: Any = multiprocessing.get_context(start_method)
        self._process: Any = None
        self._pipe: Connection | None = None
        self._killed = False

    def prepare(self) -> None:
        if self._pipe is None:
            try:
                problem = self._start_child().recv()
            except (EOFError, OSError):
                raise WorkerDied(self._bury(), is_starting=True) from None
            except RuntimeError as error:  # a script without a guard that runs again in its own child
                raise WorkerPoolBroken(f"a worker process cannot be started: {error}") from error
            if problem is not None:
                self._bury()
                raise WorkerPoolBroken(
                    f"a worker process cannot load the rollout function: {problem}; define it in a module that can be "
                    "imported, or use executor_type='thread'"
                )

    def run(self, task: Task[Any]) -> Finished:
        pipe = self._pipe
        assert pipe is not None, "prepare() comes first"
        try:
            pipe.send(task)
            answer = pipe.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDied(self._bury()) from None
        return unpacked(*pickle.loads(answer))

    def kill(self) -> None:
        self._killed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.join(EXIT_GRACE_S)
            self._process.kill()
            self._bury()

    def _start_child(self) -> Connection:
        with _starting:
            self._pipe, theirs = self._mp.Pipe()
            process = self._mp.Process(
                target=child_main, args=(theirs, self._payload), name="rollout-worker", daemon=True
            )
            with _signals_held():
                process.start()
            _children.add(process)
            theirs.close()
        self._process = process
        if self._killed:  # given up while it was starting
            process.kill()
        return self._pipe

    def _bury(self) -> int | None:
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is None:  # the system refused to start it
            return None
        process.join(EXIT_GRACE_S)
        code: int | None = process.exitcode
        return code  # not closed by hand: the interpreter may be joining it at its exit


def child_main(pipe: Connection, payload: bytes) -> None:
    """Loop of a child: ends when the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    # ... and what a SIGTERM to the whole group means. A handler, since programs started by a rollout would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Such processes may have no children, but a grader pool needs some; they end when this process does.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        call: RolloutCall = pickle.loads(payload)
    except BaseException as error:  # noqa: BLE001 (told to the parent, whatever the module of the function raises)
        pipe.send(in_words(error))
        return
    pipe.send(None)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(call, task))


def _end_with_parent() -> None:
    """A rollout that hangs must not outlive a run that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def attempt(call: RolloutCall, task: Task[Any]) -> tuple[Finished | None, BaseException | None, str]:
    """(what it finished with, error, its traceback); runs in the worker, and what it returns can be pickled."""
    try:
        finished = call(task)
        pickle.dumps(finished.result)
    except BaseException as error:  # noqa: BLE001 (the parent decides; sys.exit() in a rollout must not end the child)
        return None, _portable(error), traceback_of(error)
    return finished, None, ""


def unpacked(finished: Finished | None, error: BaseException | None, text: str) -> Finished:
    """What `attempt` returned, in the parent: the end of the attempt, or its error raised."""
    if finished is None:
        assert error is not None
        BaseException.__setattr__(error, "remote_traceback", text)  # a frozen dataclass would refuse it
        raise error
    return finished


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives being looked at and pickled, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
        return presentable(error)
    except BaseException:  # noqa: BLE001 (whatever a foreign class raises while being pickled)
        return RemoteError(in_words(error), type(error).__name__)
