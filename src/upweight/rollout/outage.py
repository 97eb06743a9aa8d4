"""Slows down a run whose rollouts all fail: a broken function does not spin, and an outage costs few tasks of the dataset.

Invariants
1. Nothing is held back before `threshold` rollouts have failed in a row; one success ends the pauses at once.
2. In an outage one rollout is started per pause. The pause doubles each time that a rollout started in it fails as well.
3. Nothing here waits: the loop asks what may start now.
"""

from __future__ import annotations

import logging
import time

from upweight.rollout.exceptions import in_words

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 30.0
LEAST_FAILURES = 3  # in a row, whatever the concurrency
TOLD_PAUSE_S = 0.5  # shorter outages are not worth a line
WARN_EVERY_S = 1.0
SHOWN_CHARS = 300

logger = logging.getLogger(__name__)


class Outage:
    """Failures in a row and what follows from them; belongs to the main loop's thread."""

    def __init__(self, threshold: int) -> None:
        self._threshold = max(LEAST_FAILURES, threshold)
        self._failures = 0
        self._last = ""
        self._pause = 0.0  # 0 = there is no outage
        self._next_start = 0.0
        self._trials: set[str] = set()  # tasks started since the pause last grew

    @property
    def is_on(self) -> bool:
        return self._pause > 0

    def may_start(self, wanted: int) -> int:
        """How many of the `wanted` rollouts may start now."""
        if not self.is_on:
            return wanted
        return min(wanted, 1) if time.monotonic() >= self._next_start else 0

    def note_started(self, task_id: str) -> None:
        if self.is_on:
            self._trials.add(task_id)
            self._next_start = time.monotonic() + self._pause

    def note_success(self) -> None:
        """A rollout returned a group, which may be a rejected one."""
        if self._pause >= TOLD_PAUSE_S:
            logger.warning("A rollout succeeded again after %d failures in a row", self._failures)
        self._failures, self._pause = 0, 0.0
        self._trials.clear()

    def note_failure(self, task_id: str, error: BaseException) -> None:
        """A task failed for good, or for now."""
        self._failures += 1
        self._last = shown(error)
        if task_id in self._trials:
            self._begin_pause(min(2 * self._pause, MAX_PAUSE_S))
        elif not self.is_on and self._failures >= self._threshold:
            self._begin_pause(FIRST_PAUSE_S)

    def _begin_pause(self, seconds: float) -> None:
        if self._pause < TOLD_PAUSE_S <= seconds:
            logger.warning("%s; one is started at a time, after growing pauses", self._failed())
        self._pause = seconds
        self._trials.clear()
        self._next_start = time.monotonic() + seconds

    def in_words(self) -> str:
        """What the run waits for; empty while there is no outage."""
        if not self.is_on:
            return ""
        left = max(0.0, self._next_start - time.monotonic())
        return f"a rollout that succeeds ({self._failed()}; next start in {left:.1f} s)"

    def _failed(self) -> str:
        return f"{self._failures} rollouts failed in a row, the last one with {self._last}"


class PacedWarnings:
    """Passes on one warning per WARN_EVERY_S; the next one tells how many were held back."""

    def __init__(self, target: logging.Logger) -> None:
        self._target = target
        self._due = 0.0
        self._held = 0
        self._latest = ""

    def warn(self, text: str) -> None:
        self._held += 1
        self._latest = text
        self.flush()

    def flush(self, is_last: bool = False) -> None:
        """Tell what was held back, when it is time."""
        if not self._held or (time.monotonic() < self._due and not is_last):
            return
        more = self._held - 1
        self._target.warning(
            "%s%s", self._latest, f"; and {more} more like it since the last such line" if more else ""
        )
        self._due, self._held = time.monotonic() + WARN_EVERY_S, 0


def shown(error: BaseException) -> str:
    """Type and text in one line of bounded length."""
    line = " ".join(in_words(error).split())
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}…"
