"""Which test belongs to which row of the two lists of failures that the SDK must not have.

Tests name their rows: "Failure H4" is a row of the list of failures of the rollout SDK, "Report H4" one of the reports from the
field. `grep -rn "Failures\\? .*\\bH4\\b" tests` finds them. Failure P5 (coverage of nothing) is a step of `.ci/run`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

FAILURES = """
    H1 H2 H3 H4 H6 H7 H8 H9 H10 H11 H13 H14
    X1 X3 X4 X5 X6 X7 X8 X10 X11 X12
    D1 D2 D3 D5 D6 D8 D9
    W1 W2 W3 W5 W6 W7 W8 W9 W10 W11 W12
    C1 C2 C4 C5 C7 C8
    S2 V1 V2 P1 P2 P3 P4
"""
REPORTS = """
    H1 H3 H5 H6 H8 H11 R1 R2 R3 R4 R7 T1 T2 T4 T6 T9 T10 T11 M6 M7 M10 M11 A3 A5 P1 P2 P3 P4 P10
    E1 E2 E3 E4 E5 E6 E9 O1 O2 O3 O4 O5 D9
"""


def named(kind: str) -> set[str]:
    """Rows that docstrings of tests name, with "R1 to R4" written out."""
    rows: set[str] = set()
    for file in TESTS.rglob("test_*.py"):
        if file == Path(__file__):
            continue
        for found in re.findall(rf"\b{kind}s? ([A-Z]\d+(?:(?:,? and |, | to )[A-Z]\d+)*)", file.read_text(), re.I):
            rows |= set(re.findall(r"[A-Z]\d+", found))
            for letter, first, last in re.findall(r"([A-Z])(\d+) to [A-Z](\d+)", found):
                rows |= {f"{letter}{n}" for n in range(int(first), int(last))}
    return rows


@pytest.mark.parametrize(("kind", "rows"), [("failure", FAILURES), ("report", REPORTS)])
def test_every_row_has_a_test(kind: str, rows: str) -> None:
    assert sorted(set(rows.split()) - named(kind)) == []
