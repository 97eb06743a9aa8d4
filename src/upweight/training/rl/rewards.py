"""Reward functions: (samples, conditions=None, **kwargs) → (B,) float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from upweight.errors import BatchError, BatchTypeError, ConfigError
from upweight.training.rl.checks import Array, as_array
from upweight.training.rl.protocols import RewardModel
from upweight.training.rl.types import GeneratedBatch


@runtime_checkable
class RewardFunction(Protocol):
    def __call__(self, samples: Any, conditions: Any = None, **kwargs: Any) -> Array:
        """One reward a sample, (B,)."""
        ...


class ConstantReward:
    """The same for every sample."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def __call__(self, samples: Any, conditions: Any = None, **kwargs: Any) -> jax.Array:
        return jnp.full(len(samples), self.value, jnp.float32)


class CompositeReward:
    """Σ wᵢ·fᵢ; weights default to 1/n. `ConfigError` (a ValueError) for no functions or another number of weights."""

    def __init__(self, reward_fns: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> None:
        self.reward_fns = list(reward_fns)
        count = len(self.reward_fns)
        if not count:
            raise ConfigError("reward_fns is empty; a composite needs at least one reward function")
        self.weights = [1.0 / count] * count if weights is None else list(weights)
        if len(self.weights) != count:
            raise ConfigError(
                f"weights has {len(self.weights)} entries for {count} reward functions; give one for each"
            )

    def __call__(self, samples: Any, conditions: Any = None, **kwargs: Any) -> jax.Array:
        rewards = (_rewards(fn, samples, conditions, kwargs) for fn in self.reward_fns)
        weighted = [weight * reward for weight, reward in zip(self.weights, rewards, strict=True)]
        return jnp.sum(jnp.stack(weighted), axis=0)


class ThresholdReward:
    """1.0 where the metric is above the threshold (below it with `above=False`), strictly, else 0.0."""

    def __init__(self, metric_fn: RewardFunction, threshold: float, above: bool = True) -> None:
        self.metric_fn, self.threshold, self.above = metric_fn, threshold, above

    def __call__(self, samples: Any, conditions: Any = None, **kwargs: Any) -> jax.Array:
        metric = _rewards(self.metric_fn, samples, conditions, kwargs)
        passed = metric > self.threshold if self.above else metric < self.threshold
        return passed.astype(jnp.float32)


class ScaledReward:
    """scale·f + offset."""

    def __init__(self, reward_fn: RewardFunction, scale: float = 1.0, offset: float = 0.0) -> None:
        self.reward_fn, self.scale, self.offset = reward_fn, scale, offset

    def __call__(self, samples: Any, conditions: Any = None, **kwargs: Any) -> jax.Array:
        return self.scale * _rewards(self.reward_fn, samples, conditions, kwargs) + self.offset


class ClippedReward:
    """f, kept within [min_value, max_value]."""

    def __init__(self, reward_fn: RewardFunction, min_value: float = -1.0, max_value: float = 1.0) -> None:
        if min_value > max_value:
            raise ConfigError(f"min_value {min_value} is above max_value {max_value}; swap them")
        self.reward_fn, self.min_value, self.max_value = reward_fn, min_value, max_value

    def __call__(self, samples: Any, conditions: Any = None, **kwargs: Any) -> jax.Array:
        return jnp.clip(_rewards(self.reward_fn, samples, conditions, kwargs), self.min_value, self.max_value)


class RewardBridge:
    """A reward function as a reward model, or a reward model as a reward function: it is both."""

    def __init__(self, source: RewardModel | RewardFunction) -> None:
        self.source = source

    def score_generations(self, batch: GeneratedBatch) -> jax.Array:
        if isinstance(self.source, RewardModel):
            return _one_each("rewards", self.source.score_generations(batch), batch.batch_size)
        return _rewards(self.source, batch.outputs, batch.conditioning, {})

    def __call__(self, samples: Any, conditions: Any = None, **kwargs: Any) -> jax.Array:
        if isinstance(self.source, RewardModel):
            return self.score_generations(GeneratedBatch(samples, conditioning=conditions))
        return _rewards(self.source, samples, conditions, kwargs)


def as_reward_model(source: RewardModel | RewardFunction | Callable[..., Array]) -> RewardBridge:
    """What takes a reward model takes this, and so does what takes a reward function."""
    if not isinstance(source, RewardModel) and not callable(source):
        raise BatchTypeError(f"a {type(source).__name__} is no reward model and no reward function")
    return source if isinstance(source, RewardBridge) else RewardBridge(source)


def _rewards(fn: Callable[..., Array], samples: Any, conditions: Any, kwargs: dict[str, Any]) -> jax.Array:
    return _one_each("rewards", fn(samples, conditions, **kwargs), len(samples))


def _one_each(name: str, rewards: Array, count: int) -> jax.Array:
    rewards = jnp.asarray(as_array(name, rewards), jnp.float32)
    if rewards.shape != (count,):
        raise BatchError(f"{name} has shape {tuple(rewards.shape)}, it must be {(count,)}, one reward a sample")
    return rewards
