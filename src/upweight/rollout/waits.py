"""No wait in silence: after a minute without progress its cause is logged, and a limit may end the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

WARN_EVERY_S = 60.0


class WaitWatch:
    """Clock of the last progress, of the last accepted sample and of the last warning."""

    def __init__(self) -> None:
        self._progress = self._accepted = self._warned = time.monotonic()

    def note_progress(self) -> None:
        self._progress = time.monotonic()

    def note_accepted(self) -> None:
        self._accepted = self._progress = time.monotonic()

    def check(self, cause: str, limit: float | None, stalled: Callable[[float], Exception]) -> None:
        """Warn when it is time; raise `stalled(seconds)` after `limit` s without an accepted sample."""
        now = time.monotonic()
        if now - max(self._progress, self._warned) >= WARN_EVERY_S:
            self._warned = now
            logger.warning("No progress for %.0f s; waiting for %s", now - self._progress, cause)
        if limit is not None and now - self._accepted >= limit:
            raise stalled(now - self._accepted)
