"""`run_demo`: options in, exit status out; everything that is printed is printed here."""

from __future__ import annotations

import json
import logging
import signal
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from upweight.demo.display import Display, clock
from upweight.demo.monitor import Monitor
from upweight.demo.record import DemoOptions
from upweight.demo.report import Report, as_dict
from upweight.demo.run import DemoRun, alone_in, prepare_home, start_record

STOPPED = 130
STOP_PATIENCE = 10.0  # seconds


def run_demo(options: DemoOptions, home: Path, *, resume: bool = False, as_json: bool = False) -> int:
    """0 = the held-out score rose significantly (or, with `quick`, the machinery is sound), 1 = it did not, 130 = stopped.

    Raises errors of the `UpweightError` tree for what cannot work.
    """
    prepare_home(home)
    with alone_in(home, patience=STOP_PATIENCE if resume else 0.0):
        return _run_demo(options, home, resume=resume, as_json=as_json)


def _run_demo(options: DemoOptions, home: Path, *, resume: bool, as_json: bool) -> int:
    _log_to(home / "logs" / "demo.log")
    console = Console(stderr=as_json, highlight=False)
    record = start_record(home, options, resume=resume)
    signal.signal(signal.SIGTERM, _as_interrupt)
    monitor = Monitor(earlier_seconds=record.seconds)
    with monitor, Display(monitor, console) as display:
        run = DemoRun(home, record, monitor, display)
        display.note(f"upweight demo: {record.options.model}, home {home}, numbers at {monitor.address}")
        try:
            report = run.go()
        except KeyboardInterrupt:
            report = None
        monitor.refresh()
        run.count_costs()
    if report is None:
        console.print("stopped. Finish this run with: [bold]upweight demo --resume[/]")
        return STOPPED
    result = replace(
        report.result,
        seconds=round(monitor.seconds, 1),
        cpu_seconds=round(record.cpu_seconds, 1),
        peak_memory_bytes=record.peak_memory_bytes,
    )
    report = replace(report, result=result)
    print_report(report, console)
    if as_json:
        print(json.dumps(as_dict(result)), flush=True)
    return 0 if report.succeeded else 1


def print_report(report: Report, console: Console) -> None:
    result = report.result
    answers = Table(title="held-out answers", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("question", "before", "after"):
        answers.add_column(column, overflow="ellipsis", no_wrap=True, max_width=34)
    for row in report.examples:
        answers.add_row(*(Text(" ".join(cell.split())) for cell in row))
    console.print()
    console.print(answers)
    console.print()
    gain = result.eval_after - result.eval_before
    style = "bold green" if report.succeeded else "bold red"
    console.print(
        f"[{style}]held-out score {result.eval_before:.3f} → {result.eval_after:.3f}[/] "
        f"({gain:+.3f}, {result.eval_tasks} tasks, p = {result.p_value:.1e})"
    )
    mismatch = "–" if result.mismatch_max is None else f"{result.mismatch_max:.1e}"
    console.print(
        f"batches {result.batches}, versions {result.versions}, samples trained {result.samples_trained}, "
        f"{clock(result.seconds)} min"
    )
    console.print(
        f"sampler and trainer differ by at most {mismatch} in log-prob; "
        f"peak memory {result.peak_memory_bytes / 1e9:.1f} GB"
    )
    for problem in report.problems:
        console.print(f"[bold red]not achieved:[/] {problem}", soft_wrap=True)
    if result.weights:
        console.print(f"weights  {result.weights}", soft_wrap=True)
        console.print(f"chat     upweight chat {result.weights}", soft_wrap=True)


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _log_to(path: Path) -> None:
    """Logs go to a file: the terminal belongs to the display."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("upweight")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
