"""What becomes of each sample of a batch; every sample has one fate.

| fate | when |
|---|---|
| refused | longer than the model's context, or an id outside its vocabulary |
| masked | its mask names no token that can be trained, or its answer was cut by length and `mask_truncated` leaves such out |
| stale | correction "masked" left out every token: the policy is too far from the one that drew them |
| zero_advantage | every advantage is exactly 0, and no critic learns from it; or `filter_flat_groups` leaves out its group |
| trained | anything else |
"""

from __future__ import annotations

import numpy as np

from upweight.ops.samples import TrainBatch
from upweight.training.settings import PolicySettings

FATES = ("trained", "zero_advantage", "masked", "stale", "refused")


def fates_before(settings: PolicySettings, batch: TrainBatch, *, max_context: int, vocab_size: int) -> list[str | None]:
    """Fates that are decided before any forward pass; None = it is to be trained on."""
    starts, fates = batch.starts, []
    left_out = is_truncated(batch) & settings.preset.mask_truncated
    for i, length in enumerate(batch.lengths.tolist()):
        span = slice(starts[i], starts[i + 1])
        ids, fate = batch.token_ids[span], None
        if length > max_context or ((ids < 0) | (ids >= vocab_size)).any():
            fate = "refused"
        elif not batch.mask[span][1:].any() or left_out[i]:
            fate = "masked"
        fates.append(fate)
    return fates


def is_truncated(batch: TrainBatch) -> np.ndarray:
    """bool [n]."""
    return batch.truncated > 0 if len(batch.truncated) else np.zeros(batch.num_samples, bool)


def fates_after(settings: PolicySettings, batch: TrainBatch, advantages: np.ndarray, left_out: np.ndarray) -> list[str]:
    """Fates of samples that were scored; the batch's mask holds the tokens that enter the loss, `advantages` is [T], `left_out`
    bool [n]: of groups without variance that are filtered."""
    sample = np.repeat(np.arange(batch.num_samples), batch.lengths)
    left = np.bincount(sample, batch.mask, minlength=batch.num_samples)
    acts = (batch.mask > 0) & (advantages != 0)  # NaN acts: it spoils the update, visibly
    acting = np.bincount(sample, acts, minlength=batch.num_samples) + (left if settings.critic else 0)
    idle = ["zero_advantage" if out else "stale" for out in left_out]
    return [idle[i] if not left[i] else "trained" if acting[i] else "zero_advantage" for i in range(len(left))]
