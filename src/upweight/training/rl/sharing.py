"""Rows that begin alike, laid out so that what they share is computed once, forward and backward.

A row's context ends before its first trained token. Rows with one context (a group's answers, the halves of a preference) stand
behind it in one packed row: `[context | answer 1 | answer 2 | …]`, as `ops.packing` lays them out, each answer seeing the context and
itself, at the positions it would have alone. What follows a row's last trained token is not computed at all.

It is done for models whose `hidden_states` takes `positions` and `allowed`, and when it computes at least a fifth fewer tokens.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

from upweight.ops.packing import PackedBatch, pack
from upweight.training.policy_step import allowed_mask
from upweight.training.rl.devices import Placement
from upweight.training.rl.sizes import Sizes

WORTH_IT = 0.8  # of the tokens that the rows have as they are
LONGEST = 1024  # of a packed row, unless two plain ones are longer: attention costs the square of it


class Layout(NamedTuple):
    """P packed rows of T tokens, and where the hidden states of a batch's B·A actions stand in them."""

    tokens: Any  # int32 [P,T]
    positions: Any  # int32 [P,T]
    block: Any  # int32 [P,T]
    segment: Any  # int32 [P,T]
    query: Any  # int32 [B·A], index into P·T; 0 where not trained

    def allowed(self) -> jax.Array:
        """bool [P,T,T]: which keys a query may look at."""
        return allowed_mask(self.block, self.segment)


class Rows(NamedTuple):
    """Rows up to their last trained token, end to end, as `pack` takes them."""

    starts: np.ndarray  # int64 [B+1]
    token_ids: np.ndarray  # int32 [Σ lengths]
    mask: np.ndarray  # uint8 [Σ lengths], 1 = trained
    place: np.ndarray  # int64 [Σ lengths], index into B·S

    @property
    def num_samples(self) -> int:
        return len(self.starts) - 1


def takes_layout(model: Any) -> bool:
    """Whether the model can compute tokens that lie elsewhere than in a row of their own."""
    if not callable(getattr(model, "hidden_states", None)):
        return False
    return {"positions", "allowed"} <= inspect.signature(model.hidden_states).parameters.keys()


def layouts(
    tokens: list[np.ndarray], masks: list[np.ndarray], sizes: Sizes, placement: Placement | None = None
) -> list[Layout] | None:
    """One layout for each piece (tokens [B,S], mask [B,S−1]), all of one shape; None when it is not worth it.

    The size is none below the one that batches of this shape had before; one that would no longer be worth it is not taken.
    """
    rows, length = tokens[0].shape
    least_height, least_width = sizes.packed((rows, length - 1))
    flat = [rows_of(*piece) for piece in zip(tokens, masks, strict=True)]
    if max(map(least_tokens, flat)) > WORTH_IT * rows * length:
        return None
    limit = max(LONGEST, 2 * length)
    packed = [pack(each, max_row=limit, least_width=max(1, least_width)) for each in flat]
    height, width = (max(each.tokens.shape[axis] for each in packed) for axis in (0, 1))
    height = max(height, least_height)
    if placement is not None:
        height = -(-height // placement.row_parts) * placement.row_parts
    if height * width > WORTH_IT * rows * length:
        return None
    sizes.pack((rows, length - 1), height, width)
    laid = [_layout(each, own.place, (rows, length), height, width) for each, own in zip(packed, flat, strict=True)]
    if placement is None:
        return laid
    split = [placement.put_rows(layout._replace(query=None)) for layout in laid]
    return [each._replace(query=layout.query) for each, layout in zip(split, laid, strict=True)]


def rows_of(tokens_BS: np.ndarray, mask_BA: np.ndarray) -> Rows:
    length = tokens_BS.shape[1]
    trained = np.pad(mask_BA > 0, ((0, 0), (1, 0)))
    lengths = np.where(trained.any(axis=1), length - np.argmax(trained[:, ::-1], axis=1), 0)
    place = np.flatnonzero(np.arange(length) < lengths[:, None])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Rows(starts, tokens_BS.reshape(-1)[place], trained.reshape(-1)[place].astype(np.uint8), place)


def least_tokens(rows: Rows) -> int:
    """Tokens that any layout computes: each distinct context once, and what follows it of every row."""
    contexts, total = set(), 0
    for start, end in itertools.pairwise(rows.starts.tolist()):
        own = rows.mask[start:end]
        if not own[1:].any():
            continue
        split = 1 + int(np.argmax(own[1:]))
        context = rows.token_ids[start : start + split].tobytes()
        total += end - start - (split if context in contexts else 0)
        contexts.add(context)
    return total


def _layout(packed: PackedBatch, place: np.ndarray, shape: tuple[int, int], height: int, width: int) -> Layout:
    own_height, own_width = packed.tokens.shape
    missing = ((0, height - own_height), (0, width - own_width))

    def padded(x: np.ndarray, fill: int = 0) -> np.ndarray:
        return np.pad(x, missing, constant_values=fill)

    real = packed.weight > 0
    row, column = np.divmod(packed.query[real], own_width)
    query = np.zeros(shape, np.int32)
    query.reshape(-1)[place[packed.source[real]]] = row * width + column
    laid = padded(packed.tokens), padded(packed.positions), padded(packed.block, -1), padded(packed.segment)
    return Layout(*laid, query[:, 1:].reshape(-1))
