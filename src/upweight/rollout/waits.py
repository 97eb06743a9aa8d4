"""No wait in silence: after a minute without progress its cause is logged, and a limit may end the run."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

WARN_EVERY_S = 60.0


class WaitWatch:
    """Clock of the last progress, of the last accepted sample and of the last warning."""

    def __init__(self) -> None:
        self._progress = self._accepted = self._warned = time.monotonic()
        self.seconds_by_cause: defaultdict[str, float] = defaultdict(float)

    def wait(self, kind: str, seconds: float) -> None:
        """Book time that the run spent waiting for `kind`."""
        self.seconds_by_cause[kind] += seconds

    def note_progress(self) -> None:
        self._progress = time.monotonic()

    def note_accepted(self) -> None:
        self._accepted = self._progress = time.monotonic()

    def hold(self) -> None:
        """No sample can be accepted now, and rightly so: the time does not count against the limit."""
        self._accepted = time.monotonic()

    def check(self, cause: str, fates: str, limit: float | None, stalled: Callable[[float], Exception]) -> None:
        """Warn when it is time; raise `stalled(seconds)` after `limit` s without an accepted sample."""
        now = time.monotonic()
        if now - max(self._progress, self._warned) >= WARN_EVERY_S:
            self._warned = now
            logger.warning("No progress for %.0f s; waiting for %s", now - self._progress, cause)
        elif now - max(self._accepted, self._warned) >= WARN_EVERY_S:
            self._warned = now
            logger.warning("No sample was accepted for %.0f s, though rollouts end: %s", now - self._accepted, fates)
        if limit is not None and now - self._accepted >= limit:
            raise stalled(now - self._accepted)


def rollouts_in_words(n_running: int, oldest: Mapping[str, float], numbers: Mapping[str, int]) -> str:
    """Which rollouts are awaited: `43 s for group 9: rollout function still running (task-…), 12 s for group 11 (task-…)`.

    `oldest`: task ids → seconds, the longest first; `numbers`: the places of tasks in the data, which are their groups' numbers.
    """
    parts: list[str] = []
    for task_id, seconds in oldest.items():
        number = numbers.get(task_id)
        is_first, named = not parts, "" if number is None else f"group {number}"
        running = ": rollout function still running" if is_first else ""
        identity = f" ({task_id})" if named else ""
        parts.append(f"{seconds:.0f} s for {named or task_id}{running}{identity}")
    if n_running > len(oldest):
        parts.append(f"and {n_running - len(oldest)} more" if parts else f"{n_running} rollouts")
    return ", ".join(parts)
