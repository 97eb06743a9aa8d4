"""The pages as data: fenced blocks, command lines, tables, paths.

Conventions of the pages: a Python block below `<!-- run: NAME -->` is a program; `<!-- run: NAME after OTHER -->` begins with the
block OTHER of the same page.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^(?:<!-- run: (?P<run>[^\n]+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`([^`]+)`")
_COMMAND = re.compile(r"(?:^|[\s(])upweight ((?:'[^']*'|[^)'\n|&])*)")


@dataclass(frozen=True)
class Block:
    language: str
    run: str | None  # what stands in the comment above
    text: str


@dataclass(frozen=True)
class CommandLine:
    page: str
    words: list[str]  # without the leading `upweight`
    whole: bool  # False: named in a sentence, where required options may be left out


def blocks(page: Path) -> list[Block]:
    return [Block(m["language"], m["run"], m["text"]) for m in _FENCE.finditer(page.read_text())]


def programs(page: Path) -> dict[str, str]:
    """Name → whole program, for each Python block of the page."""
    found: dict[str, str] = {}
    for block in blocks(page):
        if block.language == "python":
            assert block.run is not None, f"{page.name}: a Python block has no <!-- run: NAME --> above it"
            name, _, before = block.run.partition(" after ")
            found[name] = (found[before] + "\n\n" if before else "") + block.text
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def inline_codes(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in _INLINE.findall(prose(page))]


def command_lines(page: Path) -> Iterator[CommandLine]:
    """Every `upweight …` of the page's shell blocks and sentences."""
    for block in blocks(page):
        for command in _COMMAND.findall(block.text) if block.language == "sh" else ():
            yield CommandLine(page.name, shlex.split(command), whole=True)
    for code in inline_codes(page):
        for command in _COMMAND.findall(code):
            yield CommandLine(page.name, shlex.split(command), whole=False)


def table(page: Path, first_header: str) -> list[list[str]]:
    """Cells of the table whose first column has this header, without header and rule."""
    lines = page.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def bare(cell: str) -> str:
    """A cell without the backticks around it."""
    return cell.strip("`")
