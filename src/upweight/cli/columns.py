"""Plain text in columns, and small formats for people. Pure: values in, text out."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> list[str]:
    """Lines of equal columns, the header first; columns named in `right` are set flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        placed = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        ]
        return GAP.join(placed).rstrip()

    return [line(row) for row in (header, *rows)]


def fields(pairs: Sequence[tuple[str, str]], *, width: int | None = None) -> list[str]:
    """One `name  text` an entry, names in one column; text longer than `width` goes on below itself, words whole.

    Entries with an empty text are left out. Without a width nothing is broken.
    """
    shown = [(name, text) for name, text in pairs if text]
    margin = max((len(name) for name, _ in shown), default=0) + len(GAP)
    lines: list[str] = []
    for name, text in shown:
        room = max(20, (width or 0) - margin)
        parts = [text] if width is None else textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        lines += [f"{(name if i == 0 else ''):{margin}}{part}" for i, part in enumerate(parts)]
    return lines


def clipped(text: str, width: int | None) -> str:
    """`text`, its end replaced by … when it is longer than `width`."""
    return text if width is None or len(text) <= width else text[: max(0, width - 1)] + "…"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def age(seconds: float) -> str:
    """A span in its largest unit: `45 s`, `3 min`, `2 h`, `5 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def bar(done: int, total: int, width: int = 24) -> str:
    filled = min(width, width * done // total) if total else 0
    return "█" * filled + "░" * (width - filled)
