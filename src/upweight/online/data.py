"""What a grouped rollout in the trainer's process consists of. B prompts, G responses each, P longest prompt, R longest response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from upweight.ops.advantages import group_stats


@dataclass(frozen=True, kw_only=True)
class SamplingTransform:
    """What stands between raw logits and the distribution that `logprobs_old` speaks of."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0

    @property
    def not_recomputable(self) -> dict[str, float]:
        """Settings that a trainer's softmax over the whole vocabulary cannot repeat, with their values."""
        off = SamplingTransform()
        names = ("top_k", "top_p", "frequency_penalty", "min_tokens")
        changed = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(off, name)}
        return changed if self.temperature > 0 else {"temperature": self.temperature, **changed}


@dataclass(kw_only=True)
class RawRollout:
    """Generated responses before scoring. Prompts are padded on the left, responses on the right: they join directly."""

    prompts: jax.Array  # int32 [B,P], left-padded
    responses: jax.Array  # int32 [B,G,R], right-padded with 0; R is the longest response, at least 1
    response_mask: jax.Array  # bool [B,G,R], True on generated tokens, the stop token included
    logprobs_old: jax.Array  # float32 [B,G,R], under the distribution sampled from; 0 on padding
    prompt_texts: list[str] = field(default_factory=list)  # B
    response_texts: list[list[str]] = field(default_factory=list)  # B × G, special tokens skipped
    prompt_mask: jax.Array | None = None  # bool [B,P]; the generator always fills it
    logprobs_raw: jax.Array | None = None  # float32 [B,G,R], before temperature, filters and penalty
    finish_reasons: list[list[str]] = field(default_factory=list)  # B × G
    weights_version: jax.Array | None = None  # int32 [B,G], of the first token; −1 where nothing was generated
    token_versions: jax.Array | None = None  # int32 [B,G,R], only when the weights changed during generation
    metadata: list[dict[str, Any]] = field(default_factory=list)  # B, as the batch brought it
    transform: SamplingTransform | None = None  # of `logprobs_old`; the generator always fills it


@dataclass(kw_only=True)
class RolloutResult(RawRollout):
    """A rollout with its rewards."""

    rewards: jax.Array  # float32 [B,G]; 0 where `valid` is False
    valid: jax.Array | None = None  # bool [B,G], False where no answer could be produced

    @property
    def zero_variance_groups(self) -> int:
        """Prompts whose valid responses have equal rewards: they teach a group-relative method nothing."""
        rewards = np.asarray(self.rewards)
        valid = np.ones(rewards.shape, bool) if self.valid is None else np.asarray(self.valid)
        groups = np.broadcast_to(np.arange(len(rewards))[:, None], rewards.shape)[valid]
        if not len(groups):
            return 0
        _, _, counts, flat = group_stats(rewards[valid], groups)
        return len(np.unique(groups[flat & (counts > 1)]))
