"""Lines → standard output: colours of states on a terminal, plain text elsewhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STATES = {
    "green": ("succeeded",),
    "red": ("failed", "skipped"),
    "yellow": ("cancelled", "queued", "loading", "waiting_for_samples"),
    "cyan": ("running", "training"),
}
_NAMES = r"^(?:reason|model|suffix|method|created|batches|version|samples|scores|worker|weights|try it)(?=  )"
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_HEADERS = r"^ *(?:JOB|VERSION) .*$"


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def terminal_width() -> int | None:
    """Columns of the terminal; None when output goes to a pipe or file, which wants whole lines."""
    return console().width if sys.stdout.isatty() else None


def styled(lines: Sequence[str]) -> Text:
    from rich.text import Text

    text = Text(_joined(lines), no_wrap=True)
    for style, words in _STATES.items():
        text.highlight_words(words, style)
    text.highlight_regex(r"(?m)" + _NAMES, "dim")
    text.highlight_regex(r"(?m)" + _HEADERS, "dim")
    return text


def print_lines(lines: Sequence[str]) -> None:
    if sys.stdout.isatty():
        console().print(styled(lines))
    else:
        print(_joined(lines), flush=True)


def _joined(lines: Sequence[str]) -> str:
    """Names and reasons come from others: what would steer the terminal, or turn the text round, is shown as `�`."""
    return "\n".join(_UNSEEN.sub("\ufffd", line) for line in lines)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    print(json.dumps(value, indent=indent, ensure_ascii=False), flush=True)
