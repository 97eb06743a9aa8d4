"""The samples of one batch, laid end to end (numpy only; no JAX is imported)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """One filled batch of n samples; T = total tokens of all samples, end to end in order of acceptance."""

    lengths: np.ndarray  # int32 [n]
    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T], behaviour logprobs as uploaded; 0 on context
    mask: np.ndarray  # uint8 [T], 1 = trained
    reward: np.ndarray  # float32 [n], normalized_reward
    group: np.ndarray  # int32 [n], dense number of debug_info["task_id"]; a sample without one is its own group
    temperature: np.ndarray  # float32 [T], of the completion that a token is joined to; 1 on context and where unknown
    raw_logprobs: np.ndarray  # float32 [T], of the whole vocabulary, where filtered at `temperature`; NaN where unknown
    versions: np.ndarray  # int32 [T], version that sampled each token, -1 on context and where unknown
    filtered: np.ndarray  # uint8 [T], 1 = sampled with top-k, top-p, min-p, penalties or greedily
    matched: np.ndarray  # uint8 [n], joined to completions that this server served
    truncated: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.uint8)
    )  # uint8 [n], cut by length; [0] = none is
    # Samples of the same groups that lie in other batches: they count in group statistics and are not trained on here.
    peer_reward: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # float32 [m]
    peer_group: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # int32 [m]

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """int64 [n+1], where each sample begins in the flat arrays."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def targets(self) -> np.ndarray:
        """uint8 [T], `mask` without the first token of each sample, which follows from nothing."""
        targets = self.mask.copy()
        targets[self.starts[:-1][self.lengths > 0]] = 0
        return targets

    def select(self, keep: np.ndarray) -> TrainBatch:
        """The samples at the given indices, in that order."""
        starts = self.starts
        flat = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in keep]) if len(keep) else np.zeros(0, int)
        per_token = ("token_ids", "logprobs", "mask", "temperature", "raw_logprobs", "versions", "filtered")
        per_sample = ("lengths", "reward", "group", "matched")
        return TrainBatch(
            **{name: getattr(self, name)[flat] for name in per_token},
            **{name: getattr(self, name)[keep] for name in per_sample},
            truncated=self.truncated[keep] if len(self.truncated) else self.truncated,
            peer_reward=self.peer_reward,
            peer_group=self.peer_group,
        )
