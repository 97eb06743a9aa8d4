"""Where the threads of this process are."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def current_frames() -> dict[int, FrameType]:
    """`sys._current_frames()`, without a garbage collection inside.

    CPython 3.11 may collect there while it holds a lock that the end of a `threading.local` needs: the process then stands still
    for ever, and no signal helps (gh-106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()
