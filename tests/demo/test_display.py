from io import StringIO

from rich.console import Console

from upweight.demo.display import clock, plain_line, render, sparkline

NOW = {
    "phase": "training",
    "detail": "training on batch 3",
    "seconds": 83.2,
    "seconds_left": 61.0,
    "batches": 12,
    "batches_filled": 4,
    "batch_size": 32,
    "samples_in_batch": 8,
    "in_flight": 24,
    "rejected_groups": 2,
    "waiting_for": None,
    "version": 3,
    "rewards": [0.05, 0.2, 0.55],
    "mismatch_max": 4.2e-5,
    "tokens_per_second": 180.4,
}


def test_sparkline_and_clock() -> None:
    assert sparkline([0.0, 0.5, 1.0, 1.5, -1.0]) == "▁▅██▁"
    assert (clock(None), clock(59.9), clock(83.2)) == ("–", "0:59", "1:23")


def test_plain_line_tells_everything() -> None:
    expected = "[1:23] training · batch 4/12 · reward 0.55 · version 3 · 180 tokens/s · 1:01 left"
    assert plain_line(NOW) == expected


def test_live_view_fits_80_columns() -> None:
    console = Console(width=80, record=True, file=StringIO(), force_terminal=True)
    console.print(render(NOW, "http://127.0.0.1:12345/"))
    lines = console.export_text().splitlines()
    text = "\n".join(lines)
    assert all(len(line.rstrip()) <= 80 for line in lines)
    for part in ("4 of 12", "8 of 32 samples · 24 in flight · 2 rejected", "0.55", "4e-05", "1:01 left", "12345"):
        assert part in text
