"""The optimizer of a policy trainer: clipped AdamW with a schedule, all of optax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import optax

from upweight.errors import ConfigError
from upweight.training.settings import PolicySettings


def learning_rate(settings: PolicySettings) -> optax.Schedule:
    """Updates made so far → learning rate. `linear` and `cosine` fall to 0 over the job's batches; without a number of
    batches there is no end to fall to, and the rate stays constant."""
    peak, warmup, total = settings.learning_rate, settings.warmup_steps, settings.total_steps
    alone = settings.critic.warmup_batches if settings.critic else 0  # batches that leave the policy as it is
    steps = None if total is None else max(1, (total - alone) * settings.updates_per_batch - warmup)
    if settings.lr_schedule == "constant" or steps is None:
        after = optax.constant_schedule(peak)
    elif settings.lr_schedule == "linear":
        after = optax.linear_schedule(peak, 0.0, steps)
    elif settings.lr_schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, steps)
    else:
        raise ConfigError(f"lr_schedule {settings.lr_schedule!r} has no formula here")
    if warmup == 0:
        return after
    # The first step already moves: rate (i + 1)/warmup of the peak.
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1)), after], [warmup])


@dataclass(frozen=True)
class Optimizer:
    """Clips by the norm of the whole tree, then changes each array by itself."""

    rule: optax.GradientTransformation
    max_norm: float | None = None

    @property
    def _chain(self) -> optax.GradientTransformation:
        unclipped = self.max_norm is None
        return optax.chain(optax.identity() if unclipped else optax.clip_by_global_norm(self.max_norm), self.rule)

    def init(self, params: Any) -> Any:
        """(state of the clip, which is empty; state of the rule)."""
        return self._chain.init(params)

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """As optax: (change of the parameters, state), at once."""
        change, after = self._chain.update(grads, state, params)
        return change, after

    def clipped(self, grads: Any, norm: jax.Array) -> Any:
        """What the clip makes of a part of the gradients, the norm of all of which is given."""
        if self.max_norm is None:
            return grads
        most = self.max_norm
        return jax.tree.map(lambda g: jax.lax.select(norm < most, g, (g / norm.astype(g.dtype)) * most), grads)


def make_optimizer(settings: PolicySettings) -> Optimizer:
    rule = optax.adamw(
        learning_rate(settings), b1=settings.adam_b1, b2=settings.adam_b2, weight_decay=settings.weight_decay
    )
    return Optimizer(rule, settings.max_grad_norm)


def make_critic_optimizer(settings: PolicySettings) -> Optimizer:
    """Of the value head: its own constant rate and its own clip, so that its loss does not shrink the policy's step."""
    assert settings.critic is not None
    rule = optax.adam(settings.critic.learning_rate, b1=settings.adam_b1, b2=settings.adam_b2)
    return Optimizer(rule, settings.max_grad_norm)
