"""Which failed attempts are repeated, and after which wait.

Invariants
1. An inference call is never repeated after a read time-out: the server may still be working on it.
2. Inside `call_limits` no attempt but the first starts and no wait lasts beyond the deadline, and a set `cancelled` ends every wait.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
import tenacity

from upweight.api_client.exceptions import APIError, BadRequestError, InternalServerError, JsonParseError

RETRIED_CLIENT_ERRORS = frozenset({408, 425, 429})
MAX_RETRY_AFTER_S = 60.0
JITTER = 0.2


@dataclass(frozen=True)
class CallLimits:
    """`deadline` is a `time.monotonic()` value; `one_try` forbids repetitions; an attempt has `least` seconds all the same."""

    deadline: float | None = None
    cancelled: threading.Event | None = None
    one_try: bool = False
    least: float = 0.05

    def seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def is_over(self) -> bool:
        left = self.seconds_left()
        is_cancelled = self.cancelled is not None and self.cancelled.is_set()
        return self.one_try or is_cancelled or (left is not None and left <= 0)

    def sleep(self, seconds: float) -> None:
        left = self.seconds_left()
        seconds = seconds if left is None else max(0.0, min(seconds, left))
        if self.cancelled is not None:
            self.cancelled.wait(seconds)
        else:
            time.sleep(seconds)


_limits: ContextVar[CallLimits] = ContextVar("call_limits", default=CallLimits())  # noqa: B039 (frozen)


@contextmanager
def call_limits(
    *,
    deadline: float | None = None,
    cancelled: threading.Event | None = None,
    one_try: bool = False,
    least: float = CallLimits.least,
) -> Iterator[None]:
    """Bound all client calls of this thread inside the block by a deadline and a stop signal."""
    token = _limits.set(CallLimits(deadline, cancelled, one_try, least))
    try:
        yield
    finally:
        _limits.reset(token)


def limited_timeout(own: httpx.Timeout) -> httpx.Timeout | None:
    """The client's own time-outs cut down to the time left for one attempt; None when there is no limit."""
    left = _limits.get().seconds_left()
    if left is None:
        return None
    most = max(_limits.get().least, left)
    each = {name: most if value is None else min(value, most) for name, value in own.as_dict().items()}
    return httpx.Timeout(**each)


def retrying(
    max_retries: int, wait: tenacity.wait.wait_base | None, *, repeat_read_timeouts: bool
) -> tenacity.Retrying:
    """The retry loop of one logical call: at most `max_retries + 1` attempts; the last error is raised unchanged."""
    limits = _limits.get()

    def is_retried(error: BaseException) -> bool:
        if isinstance(error, httpx.ReadTimeout) and not repeat_read_timeouts:
            return False
        return is_retryable(error)

    def is_over(state: tenacity.RetryCallState) -> bool:
        return state.attempt_number > max_retries or limits.is_over

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_retried),
        stop=is_over,
        wait=wait if wait is not None else _default_wait,
        sleep=limits.sleep,
        reraise=True,
    )


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed when it is sent again."""
    if isinstance(error, BadRequestError) and error.response is not None:
        return error.response.status_code in RETRIED_CLIENT_ERRORS
    return isinstance(error, httpx.TransportError | httpx.DecodingError | InternalServerError | JsonParseError)


def is_refusal(error: BaseException) -> bool:
    """Whether sending the call again later cannot help either: 400, 401, 403, 422 and their like."""
    return isinstance(error, BadRequestError) and not is_retryable(error)


_exponential = tenacity.wait_exponential(multiplier=1, min=1, max=10)


def _default_wait(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    asked = _retry_after(error) if isinstance(error, APIError) else None
    if asked is not None:
        return asked * random.uniform(1.0, 1.0 + JITTER)
    return _exponential(state) * random.uniform(1.0 - JITTER, 1.0 + JITTER)


def _retry_after(error: APIError) -> float | None:
    """Seconds that the server asks to wait, at most 60; None when it does not ask."""
    value = error.response.headers.get("Retry-After") if error.response is not None else None
    if value is None:
        return None
    try:
        seconds = float(value)
        if math.isnan(seconds):
            return None
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (when - datetime.now(UTC if when.tzinfo else None)).total_seconds()
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
