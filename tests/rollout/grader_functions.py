"""Graders that misbehave; at module level, so that they travel to worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any


class Unloadable(Exception):
    def __init__(self, a: str, b: str) -> None:
        super().__init__(a)


class LoadsHere:
    """Can be unpickled in its own process only."""

    def __init__(self, pid: int) -> None:
        if os.getpid() != pid:
            sys.exit(9)
        self.pid = pid

    def __reduce__(self) -> Any:
        return (LoadsHere, (self.pid,))


def by_order(order: str) -> Any:
    match order:
        case "loop":
            while True:
                pass
        case "sleep":
            time.sleep(60)
        case "swallow":
            while True:
                try:
                    time.sleep(60)
                except BaseException:  # noqa: BLE001, S112 (that is what it is for)
                    continue
        case "leave":
            os._exit(7)
        case "exit":
            sys.exit(3)
        case "raise":
            raise ValueError("no such answer")
        case "huge":
            return "x" * (2 << 20)
        case "unpicklable":
            return lambda: None
        case "unloadable":
            return Unloadable("two", "arguments")
        case "loads_here":
            return LoadsHere(os.getpid())
        case "child" | "own_session":
            process = subprocess.Popen(["sleep", "60"], start_new_session=order == "own_session")
            with open(os.environ["GRADER_PID_FILE"], "w") as file:
                file.write(str(process.pid))
            time.sleep(60)
    return float(len(order))
