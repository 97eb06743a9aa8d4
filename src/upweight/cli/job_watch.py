"""`upweight jobs watch`: follows a job to its end, on a live screen or as lines.

Invariants
- A server that goes away is waited for, visibly, for `PATIENCE_S`; its new address is looked up each time.
- The watch changes nothing: when it ends early the job goes on.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from upweight.cli.connection import session
from upweight.cli.job_calls import get_job, get_progress
from upweight.cli.job_screens import OVER, end_line, show_lines, state_line, version_line
from upweight.cli.screen import console, print_json, print_lines, styled
from upweight.errors import ServerError

POLL_S = 1.0
PATIENCE_S = 60.0
HEARTBEAT_S = 30.0  # lines: a state whose words alone change is told again this often
_LIVE_OTHER_LINES = 18  # of the live screen, besides the versions


@dataclass(kw_only=True)
class Sight:
    """One look at the job; `trouble` says why the last try to look failed."""

    job: dict[str, Any]
    progress: dict[str, Any]  # with all versions so far
    fresh: list[dict[str, Any]] = field(default_factory=list)  # versions since the last look
    trouble: str = ""


class View(Protocol):
    def see(self, sight: Sight) -> None: ...


def watch(job_id: str, url: str | None, key: str | None, *, as_json: bool) -> int:
    """Follows the job to its end; 0 when it succeeded, 1 when it failed or was cancelled, or when nobody reads on."""
    with _view(as_json) as view:
        for sight in looks(job_id, url, key):
            if not is_read(sys.stdout):
                return 1
            view.see(sight)
    return 0 if sight.progress["job_status"] == "succeeded" else 1


def is_read(stream: TextIO) -> bool:
    """False once the other end of a pipe is closed: `| head` has had enough, and nothing need be written to find out."""
    try:
        waiting = select.poll()
        waiting.register(stream.fileno(), 0)  # a broken end is always told
        return not waiting.poll(0)
    except (AttributeError, OSError, ValueError):  # no such call here, or nothing that has a descriptor
        return True


def looks(job_id: str, url: str | None, key: str | None) -> Iterator[Sight]:
    """One look a second, the last one at the job that is over. Raises ServerError when the server stays away."""
    with session(url, key) as (client, _):
        job = get_job(client, job_id)
        sight = Sight(job=job, progress=get_progress(client, job_id))
    sight.fresh = sight.progress["versions"]
    yield sight
    last_answer = time.monotonic()
    while sight.progress["job_status"] not in OVER:
        time.sleep(POLL_S)
        try:
            sight = _next(sight, job_id, url, key)
            last_answer = time.monotonic()
        except ServerError as error:
            if time.monotonic() - last_answer > PATIENCE_S:
                raise
            sight = Sight(job=sight.job, progress=sight.progress, trouble=f"{error}; trying again")
        yield sight


def _next(sight: Sight, job_id: str, url: str | None, key: str | None) -> Sight:
    known = sight.progress["versions"]
    with session(url, key) as (client, _):
        progress = get_progress(client, job_id, since=known[-1]["version"] if known else -1)
    fresh = progress["versions"]
    return Sight(job=sight.job, progress={**progress, "versions": known + fresh}, fresh=fresh)


class Lines:
    """What changed, a line each."""

    def __init__(self, *, as_json: bool = False) -> None:
        self._as_json = as_json
        self._told: tuple[str, str] | None = None
        self._told_at = 0.0
        self._trouble = ""

    def see(self, sight: Sight) -> None:
        if sight.trouble:
            if sight.trouble != self._trouble:
                print(sight.trouble, file=sys.stderr, flush=True)
            self._trouble = sight.trouble
            return
        self._trouble = ""
        state = (sight.progress["job_status"], sight.progress["reason"])
        is_news = self._is_news(state)
        if is_news:
            self._told, self._told_at = state, time.monotonic()
        if self._as_json:
            if is_news or sight.fresh:
                print_json({**sight.progress, "versions": sight.fresh}, indent=None)
            return
        lines = [version_line(version) for version in sight.fresh]
        if is_news:
            lines.append(end_line(sight.progress) if state[0] in OVER else state_line(sight.progress))
        if lines:
            now = time.strftime("%H:%M:%S")
            print_lines([f"{now}  {line}" for line in lines])

    def _is_news(self, state: tuple[str, str]) -> bool:
        if self._told is None or self._told[0] != state[0]:
            return True
        if self._told == state:
            return False
        # Samples come in by the second: that they do is worth a line now and then.
        return state[0] != "waiting_for_samples" or time.monotonic() - self._told_at >= HEARTBEAT_S


class Screen:
    """The screen of `jobs show`, kept up to date."""

    def __init__(self, live: Any) -> None:
        self._live = live

    def see(self, sight: Sight) -> None:
        size = self._live.console.size
        most = max(3, size.height - _LIVE_OTHER_LINES)
        lines = show_lines(sight.job, sight.progress, time.time(), width=size.width, most_versions=most)
        if sight.trouble or sight.progress["job_status"] not in OVER:
            lines += ["", sight.trouble or "Ctrl-C ends the watch, not the job"]
        self._live.update(styled(lines), refresh=True)


@contextmanager
def _view(as_json: bool) -> Iterator[View]:
    if as_json or not sys.stdout.isatty():
        yield Lines(as_json=as_json)
        return
    from rich.live import Live

    with Live(console=console(), auto_refresh=False, screen=False, vertical_overflow="crop") as live:
        yield Screen(live)
