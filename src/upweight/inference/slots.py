"""Which slot of the decode cache holds which row (plain Python: no array library).

Decode reads keys and values from a dense copy of the pages of the rows that decode: gathering pages in every step would cost more
than the step's products. The pages stay the truth; a slot can be dropped and loaded again at any time.

Invariants:
* A slot that is not to be loaded holds the keys and values of all tokens of its row but the last.
* No slot holds two rows, no row two slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upweight.inference.scheduler import Row


@dataclass(frozen=True)
class Placement:
    """Where the rows of a step are, in the order given."""

    slots: list[int]
    load: list[int]  # places in that order whose slots must be loaded from pages first
    fresh: bool  # the cache changes its shape: everything is loaded


class Slots:
    """`place` the rows of each step; the cache has `size` slots of `width` tokens."""

    def __init__(self) -> None:
        self.size = 0
        self.width = 0
        self._rows: list[tuple[Row, int, int] | None] = []  # row, its restarts, tokens held

    def place(self, rows: Sequence[Row], size: int, width: int) -> Placement:
        """Every row's slot for a step that computes each row's last token."""
        if (size, width) != (self.size, self.width):
            self.size, self.width = size, width
            self._rows = [_held(row) for row in rows] + [None] * (size - len(rows))
            return Placement(list(range(len(rows))), list(range(len(rows))), fresh=True)
        known = {id(held[0]): slot for slot, held in enumerate(self._rows) if held is not None}
        wanted = {id(row) for row in rows}
        for row_id, slot in known.items():
            if row_id not in wanted:
                self._rows[slot] = None
        free = [slot for slot, held in enumerate(self._rows) if held is None]
        slots, load = [], []
        for at, row in enumerate(rows):
            slot = known[id(row)] if id(row) in known else free.pop()
            if self._rows[slot] != (row, row.restarts, len(row.tokens) - 1):
                load.append(at)
            slots.append(slot)
            self._rows[slot] = _held(row)
        return Placement(slots, load, fresh=False)

    def clear(self) -> None:
        """Nothing is held any more."""
        self.size = self.width = 0
        self._rows = []


def _held(row: Row) -> tuple[Row, int, int]:
    """What the slot holds once the step has computed the row's last token."""
    return row, row.restarts, len(row.tokens)
