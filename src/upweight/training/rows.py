"""Rows of a training file as token sequences, and the order in which a job trains on them (numpy only).

Invariants:
* Which rows batch k holds depends on the number of rows, the batch size and the seed alone, so a replay finds the same ones.
* Every row is trained on once an epoch; the last batch of an epoch holds what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from upweight.ops.packing import first_target
from upweight.ops.samples import TrainBatch


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """T tokens and which of them are trained."""

    ids: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T]

    def cut(self, length: int) -> TokenSequence:
        """At most `length` tokens, and none behind the last trained one."""
        trained = np.flatnonzero(self.mask[:length])
        end = int(trained[-1]) + 1 if len(trained) else 0
        return self if end == len(self.ids) else replace(self, ids=self.ids[:end], mask=self.mask[:end])

    @property
    def num_targets(self) -> int:
        """Trained tokens that have a predecessor."""
        return int(self.mask[1:].sum())


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One row of the file: a conversation, or the preferred one and the other; each is one or several sequences."""

    line: int
    parts: tuple[tuple[TokenSequence, ...], ...]

    @property
    def usable(self) -> bool:
        """Whether each part has something to train on."""
        return all(any(first_target(one.mask) is not None for one in part) for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The order of all batches of a job."""

    rows: int
    batch_size: int
    seed: int

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.rows // self.batch_size)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """int [rows], a permutation."""
        return np.random.Generator(np.random.Philox([self.seed, epoch])).permutation(self.rows)

    def batch(self, index: int) -> np.ndarray:
        """Row numbers of batch `index`."""
        epoch, place = divmod(index, self.batches_per_epoch)
        return self.epoch_order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]


def end_to_end(rows: Sequence[TrainRow]) -> tuple[TrainBatch, np.ndarray]:
    """The sequences of all rows as samples of one batch, and where each belongs: parts · row + part, int32 [n]."""
    sequences: list[TokenSequence] = []
    slots: list[int] = []
    for number, row in enumerate(rows):
        for place, part in enumerate(row.parts):
            sequences += part
            slots += [number * len(row.parts) + place] * len(part)
    lengths = np.array([len(one.ids) for one in sequences], np.int32)
    total, count = int(lengths.sum()), len(sequences)
    batch = TrainBatch(
        lengths=lengths,
        token_ids=np.concatenate([one.ids for one in sequences]).astype(np.int32),
        logprobs=np.zeros(total, np.float32),
        mask=np.concatenate([one.mask for one in sequences]).astype(np.uint8),
        reward=np.zeros(count, np.float32),
        group=np.arange(count, dtype=np.int32),
        temperature=np.ones(total, np.float32),
        raw_logprobs=np.full(total, np.nan, np.float32),
        versions=np.full(total, -1, np.int32),
        filtered=np.zeros(total, np.uint8),
        matched=np.zeros(count, np.uint8),
    )
    return batch, np.array(slots, np.int32)
