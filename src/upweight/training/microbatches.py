"""Cuts a packed batch into micro-batches of whole rows (numpy only)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from upweight.ops.packing import PackedBatch, power_bucket


def split_rows(packed: PackedBatch, max_tokens: int) -> Iterator[PackedBatch]:
    """Micro-batches of at most `max_tokens` places, never less than one row; all have the same number of rows."""
    height, width = packed.tokens.shape
    per_piece = max(1, max_tokens // width)
    if height <= per_piece:
        yield packed
        return
    real = packed.weight > 0
    row_of = packed.query // width
    for first in range(0, height, per_piece):
        if not (packed.block[first : first + per_piece] >= 0).any():
            continue
        mine = np.flatnonzero(real & (row_of >= first) & (row_of < first + per_piece))
        yield _piece(packed, first, per_piece, mine)


def _piece(packed: PackedBatch, first: int, rows: int, mine: np.ndarray) -> PackedBatch:
    height, width = packed.tokens.shape
    missing = max(0, first + rows - height)

    def cut(array: np.ndarray, fill: int) -> np.ndarray:
        return np.pad(array[first : first + rows], ((0, missing), (0, 0)), constant_values=fill)

    count = power_bucket(len(mine))

    def pick(array: np.ndarray) -> np.ndarray:
        out = np.zeros(count, array.dtype)
        out[: len(mine)] = array[mine]
        return out

    query = pick(packed.query)
    query[: len(mine)] -= first * width
    return replace(
        packed,
        tokens=cut(packed.tokens, 0),
        positions=cut(packed.positions, 0),
        block=cut(packed.block, -1),
        segment=cut(packed.segment, 0),
        query=query,
        target=pick(packed.target),
        source=pick(packed.source),
        sample=pick(packed.sample),
        weight=pick(packed.weight),
    )
