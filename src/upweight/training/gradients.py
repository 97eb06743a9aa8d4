"""Gradients over several batches, and loss scaling for half precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from upweight.errors import ConfigError, TrainingError

PyTree = Any


@dataclass(slots=True)
class GradientAccumulatorConfig:
    accumulation_steps: int = 1
    normalize_gradients: bool = True  # the mean instead of the sum

    def __post_init__(self) -> None:
        if self.accumulation_steps < 1:
            raise ConfigError(f"accumulation_steps is {self.accumulation_steps}; it must be at least 1")


class NoGradients(TrainingError, RuntimeError):
    """Gradients were asked for before any was accumulated."""


@jax.jit
def _add(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, a, b)


@jax.jit
def _divided(tree: PyTree, count: jax.Array) -> PyTree:
    return jax.tree.map(lambda x: (x / count).astype(x.dtype), tree)


class GradientAccumulator:
    """Adds up gradients until it is time for an update.

    >>> accumulator.accumulate(grads)
    >>> if accumulator.should_update(step): optimizer.update(model, accumulator.get_gradients())
    """

    def __init__(self, config: GradientAccumulatorConfig | None = None) -> None:
        self.config = GradientAccumulatorConfig() if config is None else config
        self.current_step = 0  # accumulated since the last reset
        self._total: PyTree = None

    def accumulate(self, grads: PyTree) -> None:
        self._total = grads if self._total is None else _add(self._total, grads)
        self.current_step += 1

    def should_update(self, step: int) -> bool:
        """Whether the step, counted from 0, is the last of its round."""
        return (step + 1) % self.config.accumulation_steps == 0

    def get_gradients(self) -> PyTree:
        """The sum, or with `normalize_gradients` the mean over the steps that were accumulated; begins anew.

        `NoGradients` (a RuntimeError) when there is none.
        """
        if self._total is None:
            raise NoGradients("no gradients were accumulated since the last reset; call accumulate first")
        total, count = self._total, self.current_step
        self.reset()
        return _divided(total, jnp.float32(count)) if self.config.normalize_gradients else total

    def reset(self) -> None:
        self._total, self.current_step = None, 0


@dataclass(slots=True)
class DynamicLossScalerConfig:
    initial_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.initial_scale <= self.max_scale:
            raise ConfigError(
                f"initial_scale is {self.initial_scale}; it must be in [min_scale {self.min_scale}, max_scale {self.max_scale}]"
            )
        if not (self.growth_factor > 1 and 0 < self.backoff_factor < 1 and self.growth_interval >= 1):
            raise ConfigError("growth_factor must be above 1, backoff_factor in (0, 1) and growth_interval at least 1")


class DynamicLossScaler:
    """Scales the loss so that half-precision gradients neither vanish nor overflow.

    Grows after `growth_interval` steps without an overflow, shrinks at once at one.
    """

    def __init__(self, config: DynamicLossScalerConfig | None = None) -> None:
        self.config = DynamicLossScalerConfig() if config is None else config
        self.scale = self.config.initial_scale
        self.steps_since_growth = 0

    def scale_loss(self, loss: jax.Array) -> jax.Array:
        return loss * self.scale

    def unscale_gradients(self, grads: PyTree) -> PyTree:
        return _divided(grads, jnp.float32(self.scale))

    def check_overflow(self, grads: PyTree) -> bool:
        """Whether any gradient is not finite."""
        return not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(grads))

    def update_scale(self, overflow: bool) -> None:
        config = self.config
        if overflow:
            self.scale = max(self.scale * config.backoff_factor, config.min_scale)
            self.steps_since_growth = 0
            return
        self.steps_since_growth += 1
        if self.steps_since_growth >= config.growth_interval:
            self.scale = min(self.scale * config.growth_factor, config.max_scale)
            self.steps_since_growth = 0
