"""Calls before a run starts: each may be given up in time, whatever the server does meanwhile.

Invariants
1. No such call is waited for beyond its deadline or a stop: it happens in a thread of its own, which may be left behind.
2. A failure that may pass is waited out, within a limit, and told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import httpx

from upweight.api_client import APIError
from upweight.api_client._retry import call_limits, is_refusal
from upweight.rollout import waits
from upweight.rollout.batches import CONFLICT, is_refused_with
from upweight.rollout.exceptions import in_words

logger = logging.getLogger(__name__)

R = TypeVar("R")

LEAST_TRY_S = 5.0  # for one request, however short its limit: an answer that takes its time is no failure
LOOK_EVERY_S = 0.05  # for a stop, while a call is under way
FIRST_WAIT_S = 0.1
MAX_WAIT_S = 10.0


class Stopped(Exception):
    """A stop was asked for before the call had an answer."""


def call_in_time(
    call: Callable[[], R], *, what: str, deadline: float | None, stopping: threading.Event, one_try: bool = False
) -> R:
    """What `call()` returns or raises, made under `call_limits` in a thread of its own; `deadline` is monotonic.

    `what` it does, in words, for the log.

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
    began = warned = time.monotonic()
    while not done.wait(LOOK_EVERY_S):
        if stopping.is_set():
            raise Stopped
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError("the answer did not arrive in time")
        if time.monotonic() - warned >= waits.WARN_EVERY_S:
            warned = time.monotonic()
            logger.warning("%s: no answer for %.0f s", what, warned - began)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def tried_on(
    call: Callable[[], R], *, what: str, limit: float | None, stopping: threading.Event, least: float = 0.0
) -> R:
    """What `call()` returns, tried again after growing waits while its failure may pass.

    `limit`: seconds of failing; None = for ever, 0 = one try; each try has `least` seconds all the same. A 409 may pass too: it tells of a batch that was filled meanwhile.

    Raises:
        Stopped: `stopping` was set.
        TimeoutError: the limit has passed without any answer.
        APIError, httpx.HTTPError: of the last try, when it was refused or the limit has passed.
    """
    deadline = time.monotonic() + limit if limit else None
    last: Exception | None = None
    wait = FIRST_WAIT_S
    while True:
        end = None if deadline is None else max(deadline, time.monotonic() + least)
        try:
            return call_in_time(call, what=what, deadline=end, stopping=stopping, one_try=limit == 0)
        except TimeoutError as error:
            raise last or error from None
        except (APIError, httpx.HTTPError) as error:
            if stopping.is_set():  # the stop cut the call short
                raise Stopped from error
            is_over = limit == 0 or (deadline is not None and time.monotonic() >= deadline)
            if is_over or (is_refusal(error) and not is_refused_with(error, CONFLICT)):
                raise
            last = error
        seconds = wait if deadline is None else min(wait, max(0.0, deadline - time.monotonic()))
        logger.warning("%s failed (%s); next try in %.1f s", what, in_words(last), seconds)
        if stopping.wait(seconds):
            raise Stopped
        wait = min(2 * wait, MAX_WAIT_S)
