"""How a run shows itself while it goes on: a live line on a terminal, plain lines, log records, or nothing.

Invariant: showing never ends a run; where nothing can be written any more, nothing more is shown.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TextIO

from upweight.rollout.live_line import GAP, clock, cut, live_line, losses_of, wait_line
from upweight.rollout.summary import RunProgress

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

logger = logging.getLogger(__name__)

ProgressKind = Literal["auto", "rich", "plain", "log", "none"]
KINDS = ("auto", "rich", "plain", "log", "none")
LIVE_INTERVAL_S = 0.25
LINE_INTERVAL_S = 10.0

Show = Callable[[RunProgress], None]


@contextlib.contextmanager
def reporting(kind: ProgressKind, job_id: str, stream: TextIO | None = None) -> Iterator[Show]:
    """What to call with each snapshot, as often as one likes; the last one is shown at the end, whenever it came.

    "auto" is "rich" where standard error is a terminal, else "plain". "rich" and "plain" write to standard error, "log" makes
    INFO records whose `extra` carries the numbers (`record.rollout`).
    """
    out = stream or sys.stderr
    if out is None or kind == "none":  # Python has no standard error when it was started with that closed
        yield lambda progress: None
        return
    if kind == "auto":
        kind = "rich" if out.isatty() else "plain"
    if kind == "rich":
        with _live(job_id, out) as show, _paced(show, LIVE_INTERVAL_S) as paced:
            yield paced
    elif kind == "plain":
        with _paced(lambda progress: _print(job_id, progress, out), LINE_INTERVAL_S) as paced:
            yield paced
    else:
        with _paced(lambda progress: _record(job_id, progress), LINE_INTERVAL_S) as paced:
            yield paced


def _print(job_id: str, progress: RunProgress, out: TextIO) -> None:
    print(f"{job_id}: {in_words(progress)}", file=out, flush=True)


def _record(job_id: str, progress: RunProgress) -> None:
    logger.info("Job %s: %s", job_id, in_words(progress), extra={"rollout": numbers(job_id, progress)})


class _Paced:
    """Passes on what is due, and each batch that was filled; not the same twice."""

    def __init__(self, show: Show, interval: float) -> None:
        self._show, self._interval = show, interval
        self._due = 0.0
        self._filled = 0
        self._shown: RunProgress | None = None
        self._latest: RunProgress | None = None

    def __call__(self, progress: RunProgress) -> None:
        now, self._latest = time.monotonic(), progress
        if now < self._due and progress.batches_filled == self._filled:
            return
        self._due, self._filled = now + self._interval, progress.batches_filled
        self._pass_on(progress)

    def end(self) -> None:
        """Show what came last, unless it tells no more than what was shown; nothing is waited for any more."""
        if self._latest is not None and (self._shown is None or _facts(self._latest) != _facts(self._shown)):
            self._pass_on(replace(self._latest, waiting_for=None))

    def _pass_on(self, progress: RunProgress) -> None:
        self._shown = progress
        try:
            self._show(progress)
        except (OSError, ValueError) as error:  # the other end of a pipe is gone, or the file was closed
            logger.warning("No more progress is shown: %s", error)
            self._show = lambda progress: None


def _facts(progress: RunProgress) -> RunProgress:
    return replace(progress, seconds=0.0, waiting_for=None)


@contextlib.contextmanager
def _paced(show: Show, interval: float) -> Iterator[_Paced]:
    paced = _Paced(show, interval)
    try:
        yield paced
    finally:
        paced.end()


def in_words(progress: RunProgress) -> str:
    """One line."""
    c = progress.counts
    total = "" if progress.num_batches is None else f"/{progress.num_batches}"
    lost = [f"{n} {name}" for name, n in losses_of(progress).items()]
    line = (
        f"{progress.batches_filled}{total} batches filled after {clock(progress.seconds)}, {progress.samples_in_batch} "
        f"samples in the next; version {progress.inference_version}; "
        f"{', '.join([f'{c.accepted} of {c.started} groups accepted', *lost])}; {progress.in_flight} in flight"
    )
    waiting = progress.waiting_for
    return line if waiting is None else f"{line}; waiting for {waiting}"


def numbers(job_id: str, progress: RunProgress) -> dict[str, Any]:
    """The same as data, for structured logs."""
    return {
        "job_id": job_id,
        **vars(progress.counts),
        "batches_filled": progress.batches_filled,
        "num_batches": progress.num_batches,
        "samples_in_batch": progress.samples_in_batch,
        "in_flight": progress.in_flight,
        "buffered": progress.buffered,
        "backlog": progress.backlog,
        "inference_version": progress.inference_version,
        "seconds": round(progress.seconds, 3),
    }


class _LiveView:
    """Two lines: the numbers, whose clock goes on between snapshots, and what is waited for."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._began = time.monotonic()
        self._first: RunProgress | None = None
        self._latest: tuple[float, RunProgress] | None = None

    def show(self, progress: RunProgress) -> None:
        self._first = self._first or progress
        self._latest = time.monotonic(), progress

    def stop(self) -> None:
        """The clock stands and nothing is waited for."""
        if self._latest is not None:
            self._latest = float("inf"), replace(self._latest[1], waiting_for=None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        width = options.max_width
        if self._latest is None:
            waited = clock(time.monotonic() - self._began)
            yield Text(cut(f"{waited}{GAP}waiting for the job {self._job_id}", width), no_wrap=True)
            return
        at, progress = self._latest
        age = max(0.0, time.monotonic() - at)
        now = replace(progress, seconds=progress.seconds + age)
        shown = live_line(self._job_id, now, width, self._seconds_left(now))
        line = Text(GAP, no_wrap=True, overflow="ellipsis").join(Text(part.text, part.style) for part in shown)
        yield line
        if waiting := wait_line(now, width):
            yield Text(waiting, "dim", no_wrap=True, overflow="ellipsis")

    def _seconds_left(self, progress: RunProgress) -> float | None:
        """At the pace of this run so far."""
        if self._first is None or progress.num_batches is None:
            return None
        filled = progress.batches_filled - self._first.batches_filled
        left = progress.num_batches - progress.batches_filled
        return progress.seconds / filled * left if filled and left > 0 else None


@contextlib.contextmanager
def _live(job_id: str, out: TextIO) -> Iterator[Show]:
    from rich.console import Console
    from rich.live import Live

    view = _LiveView(job_id)
    with Live(view, console=Console(file=out), refresh_per_second=4):
        try:
            yield view.show
        finally:
            view.stop()
