"""Sizes that follow from what is in a batch: its trained places, its packed rows.

A program is compiled for each of them, so they are remembered for every shape of batch and never shrink: what is missing to the
greatest that was met is filled up with places and rows that no loss sees. Sizes come from coarse grids, so one shape has few
programs, and none of them is compiled late for a batch with less in it.
"""

from __future__ import annotations

from typing import Any

Shape = tuple[int, int]  # rows, actions of a row


class Sizes:
    """The greatest sizes met so far, by shape."""

    def __init__(self) -> None:
        self._places: dict[Shape, int] = {}
        self._packed: dict[Shape, Shape] = {}

    def places(self, shape: Shape, count: int) -> int:
        """`count`, or the greatest that the shape had before; remembered."""
        self._places[shape] = max(count, self._places.get(shape, 0))
        return self._places[shape]

    def packed(self, shape: Shape) -> Shape:
        """Height and width of packed rows that were met; (0, 0) when there was none."""
        return self._packed.get(shape, (0, 0))

    def pack(self, shape: Shape, height: int, width: int) -> None:
        """Remembers a packed size, which is to be no less than the one before."""
        self._packed[shape] = height, width

    def saved(self) -> list[list[int]]:
        """Plain numbers for `load`: rows, actions, places, height, width."""
        shapes = sorted(self._places.keys() | self._packed.keys())
        return [[*shape, self._places.get(shape, 0), *self.packed(shape)] for shape in shapes]

    def load(self, saved: Any) -> None:
        self._places.clear()
        self._packed.clear()
        for rows, actions, places, height, width in saved:
            self._places[rows, actions] = int(places)
            if height:
                self._packed[rows, actions] = int(height), int(width)
