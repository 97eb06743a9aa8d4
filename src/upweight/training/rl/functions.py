"""The formulas of the trainers as plain functions of arrays; results are float32, masked entries have no influence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from upweight.errors import BatchError
from upweight.ops.logprobs import entropies, kl_divergences
from upweight.ops.masked_stats import masked_mean, masked_normalize, normalize
from upweight.ops.policy_loss import LOSSES, Limits
from upweight.ops.returns import discounted_returns, gae
from upweight.training.rl.checks import Array, as_array, check_shape

__all__ = [
    "compute_clipped_surrogate_loss",
    "compute_discounted_returns",
    "compute_gae_advantages",
    "compute_kl_divergence",
    "compute_masked_clipped_surrogate_loss",
    "compute_masked_kl_divergence",
    "compute_masked_policy_entropy",
    "compute_policy_entropy",
    "masked_mean",
    "masked_normalize",
    "normalize_advantages",
]


def compute_discounted_returns(rewards: Array, gamma: float) -> jax.Array:
    """Σ_k γ^k r_{t+k} for rewards of shape (T,)."""
    rewards = _one_dimension("rewards", rewards)
    return discounted_returns(rewards[None], jnp.ones((1, rewards.shape[0])), gamma)[0]


def compute_gae_advantages(
    rewards: Array, values: Array, dones: Array | None, gamma: float, gae_lambda: float
) -> jax.Array:
    """Generalised advantages (T,) of rewards (T,), values (T+1,), dones (T,). With T values the end is worth 0."""
    rewards, values = _one_dimension("rewards", rewards), _one_dimension("values", values)
    steps = rewards.shape[0]
    if values.shape[0] not in (steps, steps + 1):
        raise BatchError(f"values has {values.shape[0]} entries, {steps} rewards need {steps} or {steps + 1}")
    if dones is not None:
        dones = _one_dimension("dones", dones)[None]
    return gae(rewards[None], values[None], jnp.ones((1, steps)), gamma, gae_lambda, dones)[0]


def normalize_advantages(x: Array, eps: float = 1e-8) -> jax.Array:
    """(x − mean)/(population std + eps); exactly 0 for a constant."""
    return normalize(as_array("x", x), eps)


def compute_policy_entropy(log_probs: Array) -> jax.Array:
    """Mean of −Σ_v p log p over log-probs (…,V), with 0·log 0 = 0."""
    return jnp.mean(entropies(_float32("log_probs", log_probs)))


def compute_masked_policy_entropy(log_probs: Array, mask: Array, eps: float = 1e-8) -> jax.Array:
    """The same over the places of `mask` (…)."""
    kept = _kept("log_probs", log_probs, mask)
    return masked_mean(entropies(kept), as_array("mask", mask), eps)


def compute_kl_divergence(policy_log_probs: Array, ref_log_probs: Array) -> jax.Array:
    """Mean of Σ_v p (log p − log q) over log-probs (…,V)."""
    policy, reference = _float32("policy_log_probs", policy_log_probs), _float32("ref_log_probs", ref_log_probs)
    return jnp.mean(kl_divergences(policy, reference))


def compute_masked_kl_divergence(
    policy_log_probs: Array, ref_log_probs: Array, mask: Array, eps: float = 1e-8
) -> jax.Array:
    """The same over the places of `mask` (…)."""
    policy = _kept("policy_log_probs", policy_log_probs, mask)
    reference = _kept("ref_log_probs", ref_log_probs, mask)
    return masked_mean(kl_divergences(policy, reference), as_array("mask", mask), eps)


def compute_clipped_surrogate_loss(
    log_probs: Array, old_log_probs: Array, advantages: Array, clip_param: float
) -> jax.Array:
    """−mean min(ρA, clip(ρ, 1 ± ε)A), ρ = exp(log_probs − old_log_probs) with the exponent clamped to ±20."""
    log_probs = as_array("log_probs", log_probs)
    ones = jnp.ones(log_probs.shape, jnp.float32)
    return compute_masked_clipped_surrogate_loss(log_probs, old_log_probs, advantages, ones, clip_param)


def compute_masked_clipped_surrogate_loss(
    log_probs: Array, old_log_probs: Array, advantages: Array, mask: Array, clip_param: float
) -> jax.Array:
    """The same, the mean taken over the places of `mask`."""
    mask, advantages = _float32("mask", mask), _float32("advantages", advantages)
    lp, old = _float32("log_probs", log_probs), _float32("old_log_probs", old_log_probs)
    for name, array in (("old_log_probs", old), ("advantages", advantages), ("mask", mask)):
        check_shape(name, array, lp.shape, "that of log_probs")
    limits = Limits(low=clip_param, high=clip_param)
    one_sample = jnp.zeros(mask.shape, jnp.int32)
    loss = LOSSES["clip"](lp, old, advantages, mask, one_sample, limits)
    return masked_mean(loss, mask)


def _float32(name: str, x: Array) -> jax.Array:
    return jnp.asarray(as_array(name, x), jnp.float32)


def _kept(name: str, log_probs: Array, mask: Array) -> jax.Array:
    """Log-probs with those of masked places replaced before any arithmetic."""
    return jnp.where((as_array("mask", mask) > 0)[..., None], _float32(name, log_probs), 0.0)


def _one_dimension(name: str, x: Array) -> jax.Array:
    x = as_array(name, x)
    if x.ndim != 1:
        raise BatchError(f"{name} has shape {tuple(x.shape)}, it must have one dimension, time")
    return x
