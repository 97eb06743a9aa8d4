"""Kills a process with everything that it started, also what made itself a session of its own; on Linux, as far as can be seen.

What outlived the process that started it has another parent by then and is found only in the group of the first one.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from pathlib import Path

_PROC = Path("/proc")


def kill_tree(pid: int) -> None:
    """SIGKILL for the process, its group if it leads one, and its descendants. `pid` is a child of ours that was not waited for."""
    if not _PROC.is_dir():
        kill_group(pid)
        return
    _send(pid, signal.SIGSTOP)  # it starts nothing more while we look
    descendants = _descendants(pid)
    kill_group(pid)
    for each in (pid, *descendants):
        _send(each, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """SIGKILL for the group that the process leads or led, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):  # the last where there are no groups
        os.killpg(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    children = _children_by_parent()
    found, left = list[int](), [pid]
    while left:
        started = children.get(left.pop(), [])
        found += started
        left += started
    return found


def _children_by_parent() -> dict[int, list[int]]:
    children = defaultdict[int, list[int]](list)
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
            # "pid (name) state parent …"; the name may hold anything, a parenthesis too.
            after_name = (folder / "stat").read_text(errors="replace").rpartition(")")[2]
            children[int(after_name.split()[1])].append(int(folder.name))
    return children
