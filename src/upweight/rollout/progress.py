"""How a run shows itself while it goes on: a live line on a terminal, plain lines, log records, or nothing."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TextIO

from upweight.rollout.summary import RunProgress

logger = logging.getLogger(__name__)

ProgressKind = Literal["auto", "rich", "plain", "log", "none"]
KINDS = ("auto", "rich", "plain", "log", "none")
LIVE_INTERVAL_S = 0.25
LINE_INTERVAL_S = 10.0

Show = Callable[[RunProgress], None]


@contextlib.contextmanager
def reporting(kind: ProgressKind, job_id: str, stream: TextIO | None = None) -> Iterator[Show]:
    """What to call with each snapshot, as often as one likes.

    "auto" is "rich" where standard error is a terminal, else "log". "rich" and "plain" write to standard error, "log" makes
    INFO records whose `extra` carries the numbers (`record.rollout`).
    """
    out = stream or sys.stderr
    if kind == "auto":
        kind = "rich" if out.isatty() else "log"
    if kind == "rich":
        with _live(job_id, out) as show:
            yield _Paced(show, LIVE_INTERVAL_S)
    elif kind == "plain":
        yield _Paced(lambda progress: print(f"{job_id}: {in_words(progress)}", file=out, flush=True), LINE_INTERVAL_S)
    elif kind == "log":
        yield _Paced(
            lambda progress: logger.info(
                "Job %s: %s", job_id, in_words(progress), extra={"rollout": numbers(job_id, progress)}
            ),
            LINE_INTERVAL_S,
        )
    else:
        yield lambda progress: None


class _Paced:
    """Passes on what is due, and each batch that was filled; not the same twice."""

    def __init__(self, show: Show, interval: float) -> None:
        self._show, self._interval = show, interval
        self._due = 0.0
        self._filled = 0

    def __call__(self, progress: RunProgress) -> None:
        now = time.monotonic()
        if now < self._due and progress.batches_filled == self._filled:
            return
        self._due, self._filled = now + self._interval, progress.batches_filled
        self._show(progress)


def in_words(progress: RunProgress) -> str:
    """One line."""
    c = progress.counts
    total = "" if progress.num_batches is None else f"/{progress.num_batches}"
    lost = {"rejected": c.rejected, "failed": c.failed, "timed out": c.timed_out, "dropped as stale": c.dropped_stale}
    groups = [f"{c.accepted} of {c.started} groups accepted", *(f"{n} {name}" for name, n in lost.items() if n)]
    line = (
        f"{progress.batches_filled}{total} batches filled, {progress.samples_in_batch} samples in the next; "
        f"version {progress.inference_version}; {', '.join(groups)}; {progress.in_flight} in flight"
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


@contextlib.contextmanager
def _live(job_id: str, out: TextIO) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.fields[job]}"), BarColumn(bar_width=24), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("{task.description}"), console=Console(file=out), refresh_per_second=4) as bar:
        task = bar.add_task("waiting for the job", total=None, job=job_id)

        def show(progress: RunProgress) -> None:
            total, done = progress.num_batches, float(progress.batches_filled)
            bar.update(task, total=total, completed=done, description=in_words(progress).replace("[", "\\["))

        yield show
