"""Calls before a run starts: each may be given up in time, whatever the server does meanwhile.

Invariants
1. No such call is waited for beyond its deadline or a stop: it happens in a thread of its own, which may be left behind.
2. Failures that may pass are repeated until the deadline; others leave at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import httpx

from upweight.api_client import APIError, BadRequestError
from upweight.api_client._retry import call_limits, is_retryable
from upweight.rollout.exceptions import JobInitializationTimeout

R = TypeVar("R")

LOOK_EVERY_S = 0.05  # for a stop, while a call is under way
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 10.0


class Stopped(Exception):
    """A stop was asked for before the call had an answer."""


def call_in_time(
    call: Callable[[], R], *, deadline: float | None, stopping: threading.Event, one_try: bool = False
) -> R:
    """What `call()` returns or raises, made under `call_limits` in a thread of its own; `deadline` is monotonic.

    Raises:
        Stopped: `stopping` was set.
        TimeoutError: the deadline has passed.
    """
    results: list[R] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            with call_limits(deadline=deadline, cancelled=stopping, one_try=one_try):
                results.append(call())
        except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=work, name="rollout-startup", daemon=True)
    thread.start()
    while not done.wait(LOOK_EVERY_S):
        if stopping.is_set():
            raise Stopped
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError("the answer did not arrive in time")
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def may_pass(error: Exception) -> bool:
    """Whether the same call may succeed later: a busy server, a broken line, or another runner's samples in our places."""
    is_conflict = (
        isinstance(error, BadRequestError) and error.response is not None and error.response.status_code == 409
    )
    return is_conflict or is_retryable(error)


def call_until_answered(call: Callable[[], R], *, job_id: str, timeout: float | None, stopping: threading.Event) -> R:
    """Repeat `call()` while its failures may pass, at most `timeout` s (0 = one try, None = no limit).

    Raises:
        Stopped: `stopping` was set.
        JobInitializationTimeout: it still fails after `timeout` s.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    wait = FIRST_WAIT_S
    while True:
        try:
            return call_in_time(call, deadline=deadline if timeout else None, stopping=stopping, one_try=timeout == 0)
        except (APIError, httpx.HTTPError, TimeoutError) as error:
            if stopping.is_set():
                raise Stopped from error
            if not isinstance(error, TimeoutError) and not may_pass(error):
                raise
            left = wait if deadline is None else min(wait, deadline - time.monotonic())
            if left <= 0:
                raise JobInitializationTimeout(
                    job_id=job_id, timeout_seconds=timeout or 0, last_exception=error
                ) from error
        stopping.wait(left)
        wait = min(MAX_WAIT_S, 2 * wait)
