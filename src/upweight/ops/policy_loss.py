"""Policy losses per token, and how they are summed up.

One signature for losses: (lp, old, advantage, trained, sample, limits) → [N] float32, where N runs over the trained tokens of a
batch, `lp` are their log-probs under the policy being trained (carrying the gradient), `old` those of the policy that the ratio
is against, `advantage` one value a token, `trained` 1 or 0, `sample` the number of the token's sequence.
Tables are at the end. Masked entries influence neither value nor gradient, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from upweight.ops.masked_stats import masked

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Static bounds of a loss. clip: ratio in [1 − low, 1 + high]; dual_clip c: for Â < 0 a clipped loss is at most c·|Â|
    (Ye et al. 2020), None = no bound; cispo_max: cap of its weight; `sample` < num_samples."""

    low: float = 0.2
    high: float = 0.2
    dual_clip: float | None = None
    cispo_max: float = 5.0
    num_samples: int = 1


def log_ratio(lp: jax.Array, old: jax.Array, trained: jax.Array) -> jax.Array:
    """lp − old, clamped to ±20 (verl), 0 where masked."""
    return jnp.clip(masked(lp, trained) - masked(old, trained), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clipped(ratio: jax.Array, advantage: jax.Array, trained: jax.Array, limits: Limits) -> jax.Array:
    # A ratio that a sequence shares gets gradients from its masked places too: their advantage must be 0 there, not NaN.
    advantage = masked(advantage, trained)
    loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - limits.low, 1 + limits.high) * advantage)
    if limits.dual_clip is None:
        return loss
    return jnp.where(advantage < 0, jnp.minimum(loss, -limits.dual_clip * advantage), loss)


def clip_token(
    lp: jax.Array, old: jax.Array, advantage: jax.Array, trained: jax.Array, sample: jax.Array, limits: Limits
) -> jax.Array:
    """−min(ρÂ, clip(ρ, 1−ε, 1+ε_high)Â), ρ per token (PPO, Schulman et al. 2017)."""
    return masked(_clipped(jnp.exp(log_ratio(lp, old, trained)), advantage, trained, limits), trained)


def sequence_ratio(
    lp: jax.Array, old: jax.Array, trained: jax.Array, sample: jax.Array, limits: Limits, level: str
) -> jax.Array:
    """[N] of each token's sequence: exp(mean log-ratio) for level "sequence", exp(Σ log-ratio) for "sequence_sum"."""
    total, count = _per_sample(log_ratio(lp, old, trained), trained, sample, limits.num_samples)
    if level == "sequence":
        return jnp.exp(total / jnp.maximum(count, 1.0))[sample]
    return jnp.exp(jnp.clip(total, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))[sample]


def clip_sequence(
    lp: jax.Array, old: jax.Array, advantage: jax.Array, trained: jax.Array, sample: jax.Array, limits: Limits
) -> jax.Array:
    """The same with one ratio a sequence, exp(mean log-ratio) (GSPO, Zheng et al. 2025)."""
    ratio = sequence_ratio(lp, old, trained, sample, limits, "sequence")
    return masked(_clipped(ratio, advantage, trained, limits), trained)


def clip_sequence_sum(
    lp: jax.Array, old: jax.Array, advantage: jax.Array, trained: jax.Array, sample: jax.Array, limits: Limits
) -> jax.Array:
    """One ratio of whole-sequence probabilities, exp(Σ log-ratio); the term counts once a sequence (RLOO).

    Each token carries 1/length of its sequence's term, so that a token sum gives one term per sequence.
    """
    _, count = _per_sample(lp, trained, sample, limits.num_samples)
    whole = clip_sequence_term(lp, old, advantage, trained, sample, limits)
    return masked(whole / jnp.maximum(count, 1.0)[sample], trained)


def clip_sequence_term(
    lp: jax.Array, old: jax.Array, advantage: jax.Array, trained: jax.Array, sample: jax.Array, limits: Limits
) -> jax.Array:
    """As `clip_sequence_sum`, but every token carries the whole term, so that a mean over tokens gives it."""
    ratio = sequence_ratio(lp, old, trained, sample, limits, "sequence_sum")
    return masked(_clipped(ratio, advantage, trained, limits), trained)


def reinforce(
    lp: jax.Array, old: jax.Array, advantage: jax.Array, trained: jax.Array, sample: jax.Array, limits: Limits
) -> jax.Array:
    """−Â·lp, without a ratio (Williams 1992)."""
    return -masked(advantage, trained) * masked(lp, trained)


def cispo(
    lp: jax.Array, old: jax.Array, advantage: jax.Array, trained: jax.Array, sample: jax.Array, limits: Limits
) -> jax.Array:
    """−sg(min(ρ, ρ_max))·Â·lp (CISPO, MiniMax 2025): no token loses its gradient to clipping."""
    weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio(lp, old, trained)), limits.cispo_max))
    return masked(-weight * advantage * masked(lp, trained), trained)


def _per_sample(x: jax.Array, trained: jax.Array, sample: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Sum of x and number of trained tokens of each sequence, [num]."""
    return (
        jax.ops.segment_sum(masked(x, trained), sample, num),
        jax.ops.segment_sum(trained.astype(jnp.float32), sample, num),
    )


def sum_tokens(x: jax.Array, trained: jax.Array, sample: jax.Array, num: int) -> jax.Array:
    """Σ m x."""
    return jnp.sum(masked(x, trained))


def sum_token_means(x: jax.Array, trained: jax.Array, sample: jax.Array, num: int) -> jax.Array:
    """Σ over sequences of their token means."""
    total, count = _per_sample(x, trained, sample, num)
    return jnp.sum(total / jnp.maximum(count, 1.0))


@dataclass(frozen=True)
class Aggregation:
    """Loss = numerator / divisor, both over the whole optimizer batch, so that any split into micro-batches adds up."""

    numerator: Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]
    per: str  # what the divisor counts: "tokens", "sequences" with a trained token, or "sequences_x_length"

    def count(self, num_tokens: Any, num_sequences: Any, max_length: int) -> Any:
        """What the numerator is divided by; numbers or arrays."""
        return {
            "tokens": num_tokens,
            "sequences": num_sequences,
            "sequences_x_length": num_sequences * max_length,
        }[self.per]

    def divisor(self, num_tokens: int, num_sequences: int, max_length: int) -> float:
        """The count of known numbers, at least 1."""
        return float(max(self.count(num_tokens, num_sequences, max_length), 1))


def kl_k1(lp: jax.Array, ref: jax.Array, trained: jax.Array) -> jax.Array:
    """lp − ref."""
    return masked(lp, trained) - masked(ref, trained)


def kl_k2(lp: jax.Array, ref: jax.Array, trained: jax.Array) -> jax.Array:
    """½(lp − ref)²."""
    return 0.5 * kl_k1(lp, ref, trained) ** 2


def kl_k3(lp: jax.Array, ref: jax.Array, trained: jax.Array) -> jax.Array:
    """exp(ref − lp) − 1 + (lp − ref) (Schulman 2020), of a difference clamped to ±20."""
    d = log_ratio(lp, ref, trained)
    return masked(jnp.exp(-d) - 1.0 + d, trained)


Loss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, Limits], jax.Array]

LOSSES: dict[str, Loss] = {
    "clip": clip_token,
    "clip_sequence": clip_sequence,
    "clip_sequence_sum": clip_sequence_sum,
    "clip_sequence_term": clip_sequence_term,
    "cispo": cispo,
    "reinforce": reinforce,
}
# Whose ratio a loss takes; `reinforce` has none.
RATIO_LEVELS = {
    "clip": "token",
    "clip_sequence": "sequence",
    "clip_sequence_sum": "sequence_sum",
    "clip_sequence_term": "sequence_sum",
    "cispo": "token",
}
CLIPPED = RATIO_LEVELS.keys() - {"cispo"}  # losses that stop the gradient outside their range
AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": Aggregation(sum_tokens, "tokens"),
    "seq_mean_token_mean": Aggregation(sum_token_means, "sequences"),
    "seq_mean_token_sum": Aggregation(sum_tokens, "sequences"),
    "seq_mean_token_sum_norm": Aggregation(sum_tokens, "sequences_x_length"),
}
KL_ESTIMATORS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
}
