"""Rollouts with rewards, kept for several optimizer steps."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax.numpy as jnp
import numpy as np

from upweight.online.data import RawRollout, RolloutResult
from upweight.online.generator import RolloutGenerator
from upweight.online.rewards import BaseRewardModel, score_rollout

log = logging.getLogger(__name__)

PROMPT_KEYS = ("messages", "instruction", "input", "output", "input_ids", "prompts", "attention_mask", "metadata")


class RolloutRunner:
    """`runner(batch)` → (result, is_fresh).

    A result is made anew when this batch content has none yet, when `rollout_interval` optimizer steps have passed since its
    rollout, or after `clear_cache`. It is kept for its own content alone: another batch never gets it.
    """

    def __init__(self, generator: RolloutGenerator, reward_model: BaseRewardModel, rollout_interval: int = 512) -> None:
        if rollout_interval < 1:
            raise ValueError(f"rollout_interval is {rollout_interval}; it must be at least 1")
        self.generator = generator
        self.reward_model = reward_model
        self.rollout_interval = rollout_interval
        self._cache: dict[str, tuple[RolloutResult, int]] = {}
        self._steps = 0

    def step(self) -> None:
        """Call once per optimizer step."""
        self._steps += 1

    def clear_cache(self) -> None:
        """The next call is fresh; the count of steps stays."""
        self._cache.clear()

    def __call__(self, batch: Mapping[str, Any]) -> tuple[RolloutResult, bool]:
        self._forget_old()
        key = content_key(batch)
        kept = self._cache.get(key)
        if kept is not None:
            return kept[0], False
        result = self._score(self.generator.generate(batch))
        self._cache[key] = (result, self._steps)
        return result, True

    def _forget_old(self) -> None:
        oldest = self._steps - self.rollout_interval
        self._cache = {key: kept for key, kept in self._cache.items() if kept[1] > oldest}

    def _score(self, raw: RawRollout) -> RolloutResult:
        valid = np.asarray(raw.response_mask).any(axis=-1)
        rewards = np.where(valid, score_rollout(self.reward_model, raw), 0.0).astype(np.float32)
        if not valid.all():
            log.warning("%d responses could not be produced; they have reward 0 and valid = False", int((~valid).sum()))
        shared = {field.name: getattr(raw, field.name) for field in fields(RawRollout)}
        return RolloutResult(**shared, rewards=jnp.asarray(rewards), valid=jnp.asarray(valid))


def content_key(batch: Mapping[str, Any]) -> str:
    """Equal for equal prompt fields, whatever holds them (lists, numpy or JAX arrays)."""
    digest = hashlib.blake2b(digest_size=16)
    for name in PROMPT_KEYS:
        if batch.get(name) is not None:
            digest.update(name.encode())
            digest.update(json.dumps(_plain(batch[name]), sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
