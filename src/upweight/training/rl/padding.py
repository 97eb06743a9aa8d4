"""Few shapes for many batches.

The first shape that a trainer meets is taken as it is, so that training at one shape is never padded. Any other is padded to a
coarse grid: lengths on the right, rows with copies of the first row that no loss sees. Nothing here runs on the device, where
each new shape would compile anew.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from upweight.ops.packing import bucket
from upweight.training.rl.generations import GeneratedBatch, GeneratedSequenceBatch
from upweight.training.rl.rollouts import PER_ACTION, SequenceRolloutBatch

SMALLEST_LENGTH = 8


class Shapes:
    """Shape (rows, length) → the shape to pad to, None for the one that is taken as it is."""

    def __init__(self) -> None:
        self.first: tuple[int, int] | None = None
        self.row_parts = 1  # devices that rows are split over: their number is made a multiple of it

    def fit(self, rows: int, length: int, group_size: int = 1) -> tuple[int, int] | None:
        """Rows stay a multiple of the group size."""
        if self.first is None:
            self.first = (rows, length)
        multiple = math.lcm(group_size, self.row_parts)
        if (rows, length) == self.first:
            return None if rows % self.row_parts == 0 else (_up(rows, multiple), length)
        return _up(bucket(rows // group_size, 1) * group_size, multiple), bucket(length, SMALLEST_LENGTH)


def _up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def pad_rollout(batch: SequenceRolloutBatch, rows: int, length: int) -> SequenceRolloutBatch:
    """The batch with the given number of rows and tokens a row; what is added is masked.

    Masks and `valid` are filled in, so that all batches of one shape have one form.
    """
    old_rows, old_length = batch.sequences.shape
    more_rows, more = rows - old_rows, length - old_length

    def widen(x: Any, extra: int = more) -> np.ndarray | None:
        return None if x is None else _more_rows(np.pad(np.asarray(x), ((0, 0), (0, extra))), more_rows)

    fields: dict[str, Any] = {name: widen(getattr(batch, name)) for name in PER_ACTION}
    if batch.values is not None:
        values = np.asarray(batch.values)
        last = old_length - 1  # a last value, if there is one, stays last
        values = np.insert(values, [last] * more, 0, axis=1)
        fields["values"] = _more_rows(values, more_rows)
    if batch.temperature is not None:
        fields["temperature"] = _more_rows(np.asarray(batch.temperature), more_rows)
    valid = np.ones(old_rows, bool) if batch.valid is None else np.asarray(batch.valid) != 0
    fields["valid"] = np.concatenate([valid, np.zeros(more_rows, bool)])
    return replace(batch, sequence_batch=pad_sequences(batch.sequence_batch, rows, length), **fields)


def pad_sequences(batch: GeneratedSequenceBatch, rows: int, length: int) -> GeneratedSequenceBatch:
    """The same for sequences alone: added tokens are neither prompt nor response."""
    old_rows, old_length = batch.sequences.shape
    more_rows, more = rows - old_rows, length - old_length

    def widen(x: Any) -> np.ndarray | None:
        return None if x is None else _more_rows(np.pad(np.asarray(x), ((0, 0), (0, more))), more_rows)

    def taller(tree: Any) -> Any:
        return jax.tree.map(lambda x: _more_rows(np.asarray(x), more_rows), tree)

    def per_action(x: Any) -> np.ndarray | None:
        fits = x is not None and x.ndim == 2 and x.shape[1] in (old_length, old_length - 1)
        return widen(x) if fits else taller(x)

    response = np.ones((old_rows, old_length), np.float32)
    if batch.response_mask is not None:
        response = np.asarray(batch.response_mask)
    elif batch.prompt_mask is not None:
        response = (np.asarray(batch.prompt_mask) == 0).astype(np.float32)
    made = batch.generation
    generation = GeneratedBatch(
        outputs=widen(made.outputs),
        conditioning=taller(made.conditioning),
        output_mask=widen(made.output_mask),
        generation_metadata=taller(made.generation_metadata),
        old_log_probs=per_action(made.old_log_probs),
        reference_log_probs=per_action(made.reference_log_probs),
        rewards=taller(made.rewards),
    )
    masked = np.pad(response, ((0, more_rows), (0, more)))
    return GeneratedSequenceBatch(generation, prompt_mask=widen(batch.prompt_mask), response_mask=masked)


def _more_rows(x: np.ndarray, count: int) -> np.ndarray:
    """Copies of the first row, whose numbers a model can compute with."""
    return np.concatenate([x, np.repeat(x[:1], count, axis=0)]) if count else x
