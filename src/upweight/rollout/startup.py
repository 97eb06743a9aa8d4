"""Calls before a run starts: each may be given up in time, whatever the server does meanwhile.

Invariant: no such call is waited for beyond its deadline or a stop: it happens in a thread of its own, which may be left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from upweight.api_client._retry import call_limits

R = TypeVar("R")

LOOK_EVERY_S = 0.05  # for a stop, while a call is under way


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
