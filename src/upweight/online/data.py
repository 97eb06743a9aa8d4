"""What a grouped rollout in the trainer's process consists of. B prompts, G responses each, P longest prompt, R longest response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax


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


@dataclass(kw_only=True)
class RolloutResult(RawRollout):
    """A rollout with its rewards."""

    rewards: jax.Array  # float32 [B,G]; 0 where `valid` is False
    valid: jax.Array | None = None  # bool [B,G], False where no answer could be produced
