"""The demo's progress on a terminal (live) or as plain lines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from upweight.demo.monitor import Monitor

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """One block per value between 0 and 1."""
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(v * len(_BARS))))] for v in values)


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Display:
    """Shows a monitor until closed; use as a context manager."""

    def __init__(self, monitor: Monitor, console: Console) -> None:
        self._monitor = monitor
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=True)
        self._stop = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, name="display", daemon=True)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._lines.join()

    def note(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        return render(self._monitor.snapshot(), self._monitor.address)

    def _print_lines(self) -> None:
        last: tuple[Any, ...] = ()
        while not self._stop.wait(0.5):
            now = self._monitor.snapshot()
            key = (now["phase"], now["batches_filled"], now["version"])
            if key != last:
                last = key
                self.note(plain_line(now))


def render(now: dict[str, Any], address: str) -> RenderableType:
    """The live view of one snapshot."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=9)
    table.add_column()
    table.add_row("phase", Text.assemble((now["phase"], "bold"), (f"  {now['detail']}"[:60], "dim")))
    planned, filled = now["batches"], now["batches_filled"]
    if planned:
        table.add_row("batches", _bar(filled, planned, f"{filled} of {planned}"))
    if now["batch_size"] and planned and filled < planned:
        inside = f"{now['samples_in_batch']} of {now['batch_size']} samples · {now['in_flight']} in flight"
        if now["rejected_groups"]:
            inside += f" · {now['rejected_groups']} rejected"
        table.add_row("this batch", _bar(now["samples_in_batch"], now["batch_size"], inside))
    if now["rewards"]:
        table.add_row("reward", Text.assemble((sparkline(now["rewards"]), "green"), f"  {now['rewards'][-1]:.2f}"))
    if now["version"] is not None:
        mismatch = "" if now["mismatch_max"] is None else f" · sampler vs trainer {now['mismatch_max']:.0e}"
        table.add_row("version", f"{now['version']}{mismatch} · {now['tokens_per_second']:.0f} tokens/s")
    table.add_row("time", f"{clock(now['seconds'])} gone · {clock(now['seconds_left'])} left")
    table.add_row("numbers", Text(address, style="cyan"))
    return Group(Text("upweight demo", style="bold magenta"), table)


def _bar(done: float, total: float, text: str, width: int = 20) -> Text:
    full = round(width * min(1.0, done / total)) if total else 0
    return Text.assemble(("━" * full, "green"), ("━" * (width - full), "bright_black"), f"  {text}")


def plain_line(now: dict[str, Any]) -> str:
    """The same as one line, for pipes and logs."""
    parts = [f"[{clock(now['seconds'])}] {now['phase']}"]
    if now["batches"]:
        parts.append(f"batch {now['batches_filled']}/{now['batches']}")
    if now["rewards"]:
        parts.append(f"reward {now['rewards'][-1]:.2f}")
    if now["version"] is not None:
        parts.append(f"version {now['version']}")
    if now["tokens_per_second"]:
        parts.append(f"{now['tokens_per_second']:.0f} tokens/s")
    if now["seconds_left"] is not None:
        parts.append(f"{clock(now['seconds_left'])} left")
    return " · ".join(parts)
