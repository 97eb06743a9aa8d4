"""Lays the samples of a batch out in rows so that a context shared by several samples is computed once (numpy only).

A *block* is one shared context followed by the remainders of its samples: `[context | rest 1 | rest 2 | …]`. A token may look at
the tokens before it that belong to its own block and are either context (segment 0) or of its own segment. Positions count from
the start of the sample, so every token sees exactly what it would see alone.

Invariants:
* Every trained token of every sample is a target exactly once; its query is the token before it in the sample.
* The layout is a function of the arguments alone (no memory of earlier batches), so that a replayed batch compiles to the same program.
* Shapes come from a coarse grid, so that the number of programs stays small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Samples(Protocol):
    """n samples of T tokens in all, end to end."""

    @property
    def token_ids(self) -> np.ndarray: ...  # int32 [T]
    @property
    def mask(self) -> np.ndarray: ...  # uint8 [T], 1 = trained
    @property
    def starts(self) -> np.ndarray: ...  # int64 [n+1]
    @property
    def num_samples(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """R rows of T tokens and N targets; padding has block -1 and weight 0."""

    tokens: np.ndarray  # int32 [R,T]
    positions: np.ndarray  # int32 [R,T]
    block: np.ndarray  # int32 [R,T], -1 = padding
    segment: np.ndarray  # int32 [R,T], 0 = shared context
    query: np.ndarray  # int32 [N], flat index into R·T of the token that predicts the target
    target: np.ndarray  # int32 [N], token id
    source: np.ndarray  # int32 [N], index of the target in the flat batch (0 on padding)
    sample: np.ndarray  # int32 [N], which sample
    weight: np.ndarray  # float32 [N], 1 = a target, 0 = padding

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, padding left out."""
        return int((self.block >= 0).sum())


def bucket(n: int, smallest: int = 32) -> int:
    """The next of 32, 64, 96, 128, 192, 256, 384, 512, … : powers of two and the halves between, from `smallest` on."""
    size = smallest
    while size < n:
        if size * 3 // 2 >= n and size >= 2 * smallest:
            return size * 3 // 2
        size *= 2
    return size


def power_bucket(n: int, smallest: int = 64) -> int:
    size = smallest
    while size < n:
        size *= 2
    return size


def quarter_bucket(n: int) -> int:
    """The next of 64, 128, 256, 512, 768, 1024, 1280, … : powers of two, and above 512 at most four sizes between two of them."""
    size = power_bucket(n)
    step = max(size // 8, 256)
    return size if size <= 512 else -(-n // step) * step


@dataclass
class _Block:
    context: np.ndarray  # flat indices
    rests: list[tuple[int, np.ndarray]]  # (sample, flat indices)
    size: int


def pack(
    batch: Samples,
    *,
    only: np.ndarray | None = None,
    share_context: bool = True,
    max_row: int = 4096,
    least_width: int = 1,
) -> PackedBatch:
    """Packs the samples (all, or those listed in `only`) that have at least one target.

    Rows have `least_width` tokens or more; none is longer than the bucket of `max_row`, unless a single sample is.
    """
    chosen = np.arange(batch.num_samples) if only is None else only
    blocks = _blocks(batch, chosen, share_context, max_row)
    longest = max((block.size for block in blocks), default=1)
    width = bucket(max(longest, least_width))
    rows = _fill_rows(blocks, width)
    return _lay_out(batch, rows, width)


def first_target(mask: np.ndarray) -> int | None:
    """Index of the first trained token that has a predecessor; None without one."""
    trained = np.flatnonzero(mask[1:])
    return int(trained[0]) + 1 if len(trained) else None


def _blocks(batch: Samples, chosen: np.ndarray, share: bool, limit: int) -> list[_Block]:
    starts = batch.starts
    open_blocks: dict[tuple[int, ...], _Block] = {}
    done: list[_Block] = []
    for i in chosen.tolist():
        flat = np.arange(starts[i], starts[i + 1])
        split = first_target(batch.mask[flat])
        if split is None:
            continue
        context, rest = flat[:split], flat[split:]
        key = tuple(batch.token_ids[context].tolist()) if share else (i,)
        block = open_blocks.get(key)
        if block is not None and block.size + len(rest) > limit:
            done.append(block)
            block = None
        if block is None:
            block = _Block(context=context, rests=[], size=len(context))
            open_blocks[key] = block
        block.rests.append((i, rest))
        block.size += len(rest)
    return done + list(open_blocks.values())


def _fill_rows(blocks: list[_Block], width: int) -> list[list[_Block]]:
    """First fit, longest first; ties keep their order, so the result is determined."""
    rows: list[list[_Block]] = []
    free: list[int] = []
    for block in sorted(blocks, key=lambda b: -b.size):
        place = next((r for r, room in enumerate(free) if room >= block.size), None)
        if place is None:
            rows.append([])
            free.append(width)
            place = len(rows) - 1
        rows[place].append(block)
        free[place] -= block.size
    return rows


def _row_bucket(n: int) -> int:
    return max(1, n) if n <= 4 else bucket(n, smallest=4)


def _lay_out(batch: Samples, rows: list[list[_Block]], width: int) -> PackedBatch:
    height = _row_bucket(len(rows))
    tokens = np.zeros((height, width), np.int32)
    positions = np.zeros((height, width), np.int32)
    block_of = np.full((height, width), -1, np.int32)
    segment = np.zeros((height, width), np.int32)
    targets: list[tuple[int, int, int]] = []  # (query, flat source, sample)
    for r, blocks in enumerate(rows):
        at = 0
        for number, block in enumerate(blocks):

            def put(flat: np.ndarray, first_position: int, part: int, number: int = number, r: int = r) -> None:
                nonlocal at
                span = slice(at, at + len(flat))
                tokens[r, span] = batch.token_ids[flat]
                positions[r, span] = np.arange(first_position, first_position + len(flat))
                block_of[r, span] = number
                segment[r, span] = part
                at += len(flat)

            put(block.context, 0, 0)
            context_end = r * width + at - 1
            for part, (sample, rest) in enumerate(block.rests, start=1):
                begin = r * width + at
                put(rest, len(block.context), part)
                for j in np.flatnonzero(batch.mask[rest]):
                    asks = context_end if j == 0 else begin + int(j) - 1
                    targets.append((asks, int(rest[j]), sample))
    count = power_bucket(len(targets))
    query, source, sample_of = np.zeros((3, count), np.int32)
    if targets:
        query[: len(targets)], source[: len(targets)], sample_of[: len(targets)] = np.asarray(targets, np.int32).T
    weight = np.zeros(count, np.float32)
    weight[: len(targets)] = 1.0
    return PackedBatch(
        tokens=tokens,
        positions=positions,
        block=block_of,
        segment=segment,
        query=query,
        target=np.where(weight > 0, batch.token_ids[source], 0).astype(np.int32),
        source=source,
        sample=sample_of,
        weight=weight,
    )


def pack_apart(batch: Samples, *, max_row: int = 4096) -> PackedBatch:
    """As `pack`, with one block a row."""
    blocks = _blocks(batch, np.arange(batch.num_samples), True, max_row)
    width = bucket(max((block.size for block in blocks), default=1))
    return _lay_out(batch, [[block] for block in blocks], width)
