"""When the programs of a job's user were heard last. In memory: it explains a wait, and decides nothing."""

from __future__ import annotations

import time
from typing import Literal

Contact = Literal["status", "completion", "upload"]


class Contacts:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._last: dict[tuple[str, Contact], float] = {}

    def note(self, job_id: str, contact: Contact) -> None:
        self._last[job_id, contact] = time.monotonic()

    def age(self, job_id: str, contact: Contact) -> float | None:
        """Seconds since the last contact of this kind; None if there was none since the server started."""
        last = self._last.get((job_id, contact))
        return None if last is None else time.monotonic() - last

    @property
    def seconds_up(self) -> float:
        """Seconds that contacts have been noted for."""
        return time.monotonic() - self._began
