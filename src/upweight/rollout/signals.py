"""Signals while a run is in the main thread: a first SIGINT or SIGTERM stops it, a second one interrupts it, SIGUSR1 asks for a report.

Invariants
1. A handler that Python does not know (installed from C, by `faulthandler` or by a program around the interpreter) is left alone:
   once replaced it could not be brought back.
2. After the block every signal is as it was before, unless the program changed it meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_AT_C = {signal.SIG_DFL: 0, signal.SIG_IGN: 1}


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

    def ask(number: int, frame: FrameType | None) -> None:
        report()

    ours: dict[int, Any] = {}
    for ends in (signal.SIGINT, signal.SIGTERM):
        if _is_known_to_python(ends):
            ours[ends] = handle
        else:
            logger.info("%s does not stop this run: it has a handler from outside of Python", ends.name)
    asks = getattr(signal, "SIGUSR1", None)
    if asks is not None and signal.getsignal(asks) is signal.SIG_DFL and _is_known_to_python(asks):
        ours[asks] = ask
    former = {number: signal.signal(number, handler) for number, handler in ours.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            if signal.getsignal(number) is ours[number]:
                signal.signal(number, handler)


def _is_known_to_python(number: int) -> bool:
    """Whether what `signal.getsignal` tells is what the system has."""
    told = signal.getsignal(number)
    if told is None:
        return False
    if not isinstance(told, signal.Handlers):
        return True
    try:
        ask = ctypes.pythonapi.PyOS_getsig
    except AttributeError:  # another Python than CPython
        return True
    ask.restype, ask.argtypes = ctypes.c_void_p, [ctypes.c_int]
    return (ask(number) or 0) == _AT_C[told]
