"""How often a project may ask: a token bucket each, which holds a burst of two seconds."""

from __future__ import annotations

import time

from upweight.server.refusals import Refusal

BURST_SECONDS = 2.0


class Rates:
    """`per_second` requests of each project; None = as many as come."""

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._buckets: dict[str, tuple[float, float]] = {}  # project → requests left, as of when

    def take(self, project: str) -> None:
        """Count one request. Raises Refusal 429 when the project has none left."""
        if self._per_second is None:
            return
        now = time.monotonic()
        largest = max(1.0, self._per_second * BURST_SECONDS)
        left, since = self._buckets.get(project, (largest, now))
        left = min(largest, left + (now - since) * self._per_second)
        if left < 1.0:
            self._buckets[project] = (left, now)
            raise Refusal(
                429, f"more than {self._per_second:g} requests a second of project {project}; try again later"
            )
        self._buckets[project] = (left - 1.0, now)
