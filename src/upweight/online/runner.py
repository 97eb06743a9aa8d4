"""Rollouts with rewards, kept for several optimizer steps."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax
import numpy as np

from upweight.online.data import RawRollout, RolloutResult
from upweight.online.generator import RolloutGenerator
from upweight.online.rewards import BaseRewardModel, score_rollout

PROMPT_KEYS = ("messages", "instruction", "input", "output", "input_ids", "prompts", "attention_mask", "metadata")


class RolloutRunner:
    """`runner(batch)` → (result, is_fresh).

    A result is made anew when this batch content has none yet, when `rollout_interval` optimizer steps have passed since its
    rollout, or after `clear_cache`. It is kept for its own content alone: another batch never gets it.
    """

    def __init__(self, generator: RolloutGenerator, reward_model: BaseRewardModel, rollout_interval: int = 512) -> None:
        if isinstance(rollout_interval, bool) or not isinstance(rollout_interval, int) or rollout_interval < 1:
            raise ValueError(f"rollout_interval is {rollout_interval!r}; it must be a whole number of at least 1")
        self.generator = generator
        self.reward_model = reward_model
        self.rollout_interval = rollout_interval
        self._cache: dict[str, tuple[RolloutResult, int]] = {}
        self._steps = 0

    def step(self) -> None:
        """Call once per optimizer step."""
        self._steps += 1
        self._forget_old()

    def clear_cache(self) -> None:
        """The next call is fresh; the count of steps stays."""
        self._cache.clear()

    def __call__(self, batch: Mapping[str, Any]) -> tuple[RolloutResult, bool]:
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"batch is {type(batch).__name__}; it must be a mapping with 'messages', 'instruction' or 'prompts'"
            )
        key = content_key(batch)
        kept = self._cache.get(key)
        if kept is not None:
            return kept[0], False
        result = self._score(self.generator.generate(batch))
        self._cache[key] = (result, self._steps)
        return result, True

    def _forget_old(self) -> None:
        """What no call can get any more is not kept in memory either."""
        oldest = self._steps - self.rollout_interval
        self._cache = {key: kept for key, kept in self._cache.items() if kept[1] > oldest}

    def _score(self, raw: RawRollout) -> RolloutResult:
        device = next(iter(raw.prompts.devices()))
        rewards = jax.device_put(score_rollout(self.reward_model, raw), device)
        valid = jax.device_put(np.asarray(raw.response_mask).any(axis=-1), device)
        shared = {field.name: getattr(raw, field.name) for field in fields(RawRollout)}
        return RolloutResult(**shared, rewards=rewards, valid=valid)


def content_key(batch: Mapping[str, Any]) -> str:
    """Equal for equal prompt fields, whatever holds them (lists, numpy or JAX arrays).

    `ValueError` names a field with an object whose content cannot be told, such as a lambda.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in PROMPT_KEYS:
        if batch.get(name) is not None:
            digest.update(name.encode())
            digest.update(json.dumps(_plain(name, batch[name]), sort_keys=True).encode())
    return digest.hexdigest()


def _plain(field: str, value: Any) -> Any:
    """What JSON can say; other objects by their pickle, so that different ones never share a key."""
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "tolist"):
        return _plain(field, value.tolist())
    if isinstance(value, Mapping):
        return {f"{type(key).__name__} {key}": _plain(field, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(field, item) for item in value]
    return [type(value).__qualname__, hashlib.blake2b(_pickled(field, value)).hexdigest()]


def _pickled(field: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{field} holds {value!r}, whose content cannot be compared between batches ({error}); "
            "give data (texts, numbers, lists, arrays, picklable objects) and keep functions in the reward model"
        ) from error
