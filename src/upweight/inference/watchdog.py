"""Notices that a step does not come back, while the thread that runs it can only wait.

Invariant: `on_late` and `on_lost` run while the step is still out, and `step` does not end before they have returned; so they may
touch what belongs to the waiting thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from upweight.errors import EngineError

PATIENCE = 3  # a step that is out this many times the limit is not coming back


class StepTooLate(EngineError):
    """The step came back after its requests had been answered."""


class Watchdog:
    """`with watchdog.step():` around what may hang. Its own thread ends with `stop`."""

    def __init__(self, limit: float, *, on_late: Callable[[], None], on_lost: Callable[[], None]) -> None:
        self.limit = limit
        self._on_late = on_late
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._began: float | None = None
        self._told = 0  # 1 = late, 2 = lost
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def late(self) -> bool:
        """Whether a step is out for longer than the limit."""
        return self._told > 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="engine watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def give_up(self) -> None:
        """A step that is out now is lost, whatever its limit."""
        with self._changed:
            if self._began is not None and self._told < 2:
                self._told = 2
                self._on_lost()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Raises StepTooLate in the end when `on_late` was called meanwhile."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                told, self._told, self._began = self._told, 0, None
        if told:
            raise StepTooLate(f"a step took longer than {self.limit:g} s")

    def _watch(self) -> None:
        """Looks a few times per limit, so that a step costs no hand-over to this thread."""
        with self._changed:
            while not self._stopped:
                self._changed.wait(self.limit / 8)
                out = 0.0 if self._began is None else time.monotonic() - self._began
                if self._told == 0 and out > self.limit:
                    self._told = 1
                    self._on_late()
                elif self._told == 1 and out > PATIENCE * self.limit:
                    self._told = 2
                    self._on_lost()
