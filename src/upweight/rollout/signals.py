"""Signals while a run is in the main thread: a first SIGINT or SIGTERM stops it, a second one interrupts it, SIGUSR1 asks for a report."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def run_signals(stop: Callable[[str], None], report: Callable[[], None]) -> Iterator[None]:
    """Call `stop(signal name)` on the first signal to end, `report()` on SIGUSR1; former handlers come back after the block.

    SIGUSR1 is left alone where the program has a handler of its own, and where there is none such (Windows).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        stop(signal.Signals(number).name)

    former: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    asks = getattr(signal, "SIGUSR1", None)
    if asks is not None and signal.getsignal(asks) is signal.SIG_DFL:
        former[asks] = signal.signal(asks, lambda number, frame: report())
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
