"""A training file: JSON lines, one row each. Read as a stream; a line is held at a time.

Invariants:
* What is refused is named with line (from 1) and field; the first `MOST_PROBLEMS` are listed.
* Lines that hold nothing, CRLF ends and a byte order mark change nothing; each of them is told once, as a note.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upweight.server.refusals import Refusal, invalid, problem
from upweight.server.training_rows import Conversation, RowError, conversations

MOST_PROBLEMS = 20
LONGEST_LINE = 16_000_000  # bytes


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line that can be trained on."""

    line: int
    conversations: tuple[Conversation, ...]


@dataclass(kw_only=True)
class Checked:
    """What a file holds."""

    rows: int = 0
    notes: list[str] = field(default_factory=list)


class LineError(ValueError):
    """A line that is no row, with what is wrong in which field."""

    def __init__(self, line: int, where: str, message: str) -> None:
        self.line, self.field = line, where
        super().__init__(f"line {line}: {where + ': ' if where else ''}{message}")


def check_file(path: Path, kind: str, *, name: str = "training_file") -> Checked:
    """Read all of the file as rows of a job of type `kind`; the request calls it `name`. Raises Refusal 422 listing what is wrong."""
    checked, problems, loc = Checked(), [], ("body", name)
    lines = _Lines(path)
    for number, text in lines:
        try:
            _parse(number, text, kind)
            checked.rows += 1
        except LineError as error:
            problems.append(problem((*loc, "line", error.line, error.field), str(error), "training_file"))
            if len(problems) == MOST_PROBLEMS:
                break
    if problems:
        raise Refusal(422, problems)
    if checked.rows == 0:
        what = "is empty" if lines.size == 0 else f"holds no rows, only {lines.blank} blank lines"
        raise invalid(loc, f"the {name.replace('_', ' ')} {what}; it needs one JSON object per line", "training_file")
    checked.notes = lines.notes(name.replace("_", " "))
    return checked


def read_rows(path: Path, kind: str) -> Iterator[Row]:
    """The rows of a file that `check_file` has accepted. Raises LineError where it was changed since."""
    for number, text in _Lines(path):
        yield _parse(number, text, kind)


def _parse(number: int, text: bytes, kind: str) -> Row:
    try:
        return Row(line=number, conversations=conversations(_json(number, text), kind))
    except RowError as error:
        raise LineError(number, error.field, str(error)) from error


def _json(number: int, text: bytes) -> Any:
    if len(text) > LONGEST_LINE:
        raise LineError(number, "", f"longer than {LONGEST_LINE / 1e6:g} MB; is it one JSON object per line?")
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise LineError(
            number, "", f"not UTF-8: byte 0x{byte:02x} at position {error.start + 1}; save it as UTF-8"
        ) from error
    try:
        value = json.loads(decoded, parse_constant=_no_constant)
        # JSON can smuggle in half of a surrogate pair, which no tokenizer takes.
        if "\\u" in decoded:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise LineError(
            number, "", "holds half of a surrogate pair (\\ud800 to \\udfff); write whole characters"
        ) from error
    except json.JSONDecodeError as error:
        raise LineError(number, "", f"not JSON: {error.msg} at position {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise LineError(number, "", f"not JSON: {error}") from error
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class _Lines:
    """Numbered lines that hold something, without their ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = self.blank = self._first_blank = 0
        self._has_mark = self._has_crlf = False

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        with self._path.open("rb") as file:
            number = 0
            while text := file.readline(LONGEST_LINE + 2):
                number += 1
                self.size += len(text)
                if number == 1 and text.startswith(codecs.BOM_UTF8):
                    self._has_mark, text = True, text.removeprefix(codecs.BOM_UTF8)
                self._has_crlf |= text.endswith(b"\r\n")
                if not text.strip():
                    self.blank += 1
                    self._first_blank = self._first_blank or number
                    continue
                yield number, text.rstrip(b"\r\n")
                if len(text) > LONGEST_LINE:
                    return  # what follows is the rest of that line

    def notes(self, name: str) -> list[str]:
        notes = []
        if self._has_mark:
            notes.append(f"the {name} begins with a byte order mark; it is ignored")
        if self._has_crlf:
            notes.append(f"lines of the {name} end with CRLF; they are read like others")
        if self.blank:
            notes.append(
                f"the {name} has {self.blank} blank lines, the first is line {self._first_blank}; they are ignored"
            )
        return notes
