"""A server that does not answer while something waits for it: told at its begin, then once a minute, and at its end."""

from __future__ import annotations

import logging
import time

WARN_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class Outage:
    """`what` is asked for, again and again; belongs to one thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began: float | None = None
        self._told = 0.0
        self.error: Exception | None = None  # of the last try

    def note(self, error: Exception) -> None:
        """A try failed in a way that another one may not."""
        now = time.monotonic()
        self.error = error
        is_first = self._began is None
        self._began = now if self._began is None else self._began
        if is_first or now - self._told >= WARN_EVERY_S:
            self._told = now
            logger.warning("Asking for %s again: %s", self._what, self)

    def end(self) -> None:
        """The server answered."""
        if self._began is not None:
            logger.warning("The server answers again about %s, after %.0f s", self._what, self._seconds())
        self._began = self.error = None

    def __str__(self) -> str:
        said = " ".join(str(self.error).split()) or "no text"
        return f"no answer of the server for {self._seconds():.0f} s ({type(self.error).__name__}: {said})"

    def _seconds(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began
