"""What a run tells while it goes on, cut to the width of a terminal. Plain Python: no drawing here.

Invariants
1. No line is wider than the terminal.
2. Batches, time and losses are always told; of the rest, what matters least goes first.
"""

from __future__ import annotations

from typing import NamedTuple

from upweight.rollout.summary import RunProgress

GAP = "  "
BAR_WIDTHS = (24, 12)
NEEDED = 0  # the rank of what is never left out


class Part(NamedTuple):
    """One thing to tell: its forms, the longest first; the lower its rank the later it is left out."""

    rank: int
    style: str
    forms: tuple[str, ...]


class Shown(NamedTuple):
    style: str
    text: str


def clock(seconds: float) -> str:
    """`0:01:23`; days are hours here."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def losses_of(progress: RunProgress) -> dict[str, int]:
    """How many groups were lost, by what became of them."""
    c = progress.counts
    named = {"rejected": c.rejected, "failed": c.failed, "timed out": c.timed_out, "dropped as stale": c.dropped_stale}
    return {name: n for name, n in named.items() if n}


def live_line(job_id: str, progress: RunProgress, width: int, seconds_left: float | None = None) -> list[Shown]:
    """The parts of the line, in their order; `seconds_left` is an estimate of the rest of the run."""
    c, done, total = progress.counts, progress.batches_filled, progress.num_batches
    batches = f"{done}" if total is None else f"{done}/{total}"
    parts = [
        Part(8, "bold", (job_id,)),
        Part(7, "green", () if not total else tuple(_bar(done / total, n) for n in BAR_WIDTHS)),
        Part(NEEDED, "bold green", (f"{batches} batches", batches)),
        Part(6, "", (f"{progress.samples_in_batch} samples in the next", f"+{progress.samples_in_batch} samples")),
        Part(NEEDED, "cyan", (clock(progress.seconds),)),
        Part(1, "cyan", () if seconds_left is None else (f"{clock(seconds_left)} left",)),
        Part(NEEDED, "yellow", _losses(progress)),
        Part(2, "", (f"{c.accepted} of {c.started} groups accepted", f"{c.accepted}/{c.started} groups")),
        Part(3, "", (f"version {progress.inference_version}", f"v{progress.inference_version}")),
        Part(4, "", (f"{progress.in_flight} in flight",)),
    ]
    return fit([part for part in parts if part.forms], width)


def wait_line(progress: RunProgress, width: int) -> str:
    """What the run waits for, in one line; empty when it waits for nothing."""
    return cut(f"waiting for {progress.waiting_for}", width) if progress.waiting_for else ""


def _losses(progress: RunProgress) -> tuple[str, ...]:
    losses = losses_of(progress)
    if not losses:
        return ()
    long = ", ".join(f"{n} {name}" for name, n in losses.items())
    return long, long.replace("dropped as stale", "stale"), f"{sum(losses.values())} lost"


def _bar(share: float, width: int) -> str:
    full = int(width * min(1.0, share))
    return "━" * full + "─" * (width - full)


def fit(parts: list[Part], width: int) -> list[Shown]:
    """The parts that have room. Needed ones are told at length if they can; of the others many are better than long ones."""
    ranked = sorted(range(len(parts)), key=lambda place: parts[place].rank)
    chosen: dict[int, str] = {}
    room = width + len(GAP)
    for n, place in enumerate(ranked):
        rank, _, forms = parts[place]
        reserved = sum(_cost(parts[p].forms[-1]) for p in ranked[n + 1 :] if parts[p].rank == NEEDED)
        tried = forms if rank == NEEDED else forms[-1:]
        form = next((form for form in tried if _cost(form) + reserved <= room), None)
        if form is None and rank == NEEDED:
            form = cut(forms[-1], room - len(GAP))
        if form:
            chosen[place] = form
            room -= _cost(form)
    for place in ranked:
        if place in chosen:
            most = len(chosen[place]) + room
            longer = next((form for form in parts[place].forms if len(form) <= most), chosen[place])
            room -= len(longer) - len(chosen[place])
            chosen[place] = longer
    return [Shown(parts[place].style, chosen[place]) for place in sorted(chosen)]


def _cost(form: str) -> int:
    return len(form) + len(GAP)


def cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return f"{text[: width - 1]}…" if width > 1 else ""
