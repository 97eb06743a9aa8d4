"""The end of a run: what was accepted is sent, then every thread ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from upweight.rollout.uploader import Uploader

logger = logging.getLogger(__name__)

LAST_JOINS_S = 0.5  # for threads to end when no time is left


class Helper(Protocol):
    """A thread of a run."""

    name: str

    def stop(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


def end(uploader: Uploader, helpers: Sequence[Helper], seconds: float) -> None:
    """Send the rest and shut down, both within `seconds` in all; an interrupt here ends either at once."""
    deadline = time.monotonic() + seconds
    try:
        _send_rest(uploader, deadline)
    except BaseException:  # an interrupt as well: no more waiting
        deadline = time.monotonic()
        raise
    finally:
        _shut_down(helpers, max(deadline, time.monotonic() + LAST_JOINS_S))


def _send_rest(uploader: Uploader, deadline: float) -> None:
    """Give the uploader the time until then to send what was accepted."""
    while uploader.backlog and uploader.is_alive() and time.monotonic() < deadline:
        uploader.hurry()
        time.sleep(0.01)
    if uploader.backlog:
        logger.warning("Job %s: %d accepted samples are unsent", uploader.job_id, uploader.backlog)


def _shut_down(helpers: Sequence[Helper], deadline: float) -> None:
    for helper in helpers:
        helper.stop()
    for helper in helpers:
        helper.join(max(0.0, deadline - time.monotonic()))
        if helper.is_alive():
            logger.warning("Thread %s is still waiting; it is left behind", helper.name)
