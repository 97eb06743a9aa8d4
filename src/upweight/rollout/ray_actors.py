"""A rollout executor in a Ray actor: function, context and clients are sent once, then tasks one by one.

An actor asks for no CPU of its own, since rollouts mostly wait for the model; `max_concurrency` bounds how many there are.
Functions travel by Ray's own pickling, so closures and those of a notebook may be sent too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from upweight.errors import RolloutError
from upweight.rollout.exceptions import WorkerDied
from upweight.rollout.models import Task
from upweight.rollout.processes import attempt, pickled_call, unpacked
from upweight.rollout.workers import Finished, RolloutCall


def ray_executors(call: RolloutCall) -> Callable[[], InRay]:
    """What makes an executor; connects to Ray, or starts it on this machine, unless the program has done so.

    Raises:
        RolloutError: Ray is not installed.
        TypeError: naming the part of the call that cannot be sent.
    """
    # Below `uv run`, Ray would build a second environment for its workers, without what this one has. Read at its import.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
        from ray import cloudpickle
    except ImportError:
        raise RolloutError("executor_type 'ray' needs the extra: pip install 'upweight[ray]'") from None
    payload = pickled_call(call, cloudpickle.dumps)
    if not ray.is_initialized():
        with _signal_handlers_kept():
            ray.init(include_dashboard=False, logging_level=logging.WARNING)
    remote = ray.remote(num_cpus=0, max_restarts=0)(_Actor)
    return lambda: InRay(payload, remote)


@contextlib.contextmanager
def _signal_handlers_kept() -> Any:
    """Ray sets a handler of SIGTERM that would exit at once; a run stops cleanly instead."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class _Actor:
    """Lives in a worker of Ray."""

    def __init__(self, payload: bytes) -> None:
        from ray import cloudpickle

        self._call: RolloutCall = cloudpickle.loads(payload)

    def ready(self) -> None:
        """Answered once the actor is there."""

    def attempt(self, task: Task[Any]) -> tuple[Finished | None, BaseException | None, str]:
        return attempt(self._call, task)


class InRay:
    """Drives one actor; a dead one is replaced when the next attempt comes."""

    def __init__(self, payload: bytes, remote: Any) -> None:
        self._payload = payload
        self._remote = remote
        self._actor: Any = None
        self._killed = False

    def prepare(self) -> None:
        if self._actor is not None:
            return
        self._actor = self._remote.remote(self._payload)
        if self._killed:  # given up before it was there
            self.kill()
        self._get(self._actor.ready.remote())

    def run(self, task: Task[Any]) -> Finished:
        return unpacked(*self._get(self._actor.attempt.remote(task)))

    def _get(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayActorError as death:
            self._actor = None
            raise WorkerDied(None) from death

    def kill(self) -> None:
        import ray

        self._killed = True
        if self._actor is not None and ray.is_initialized():
            ray.kill(self._actor)

    def close(self) -> None:
        self.kill()
