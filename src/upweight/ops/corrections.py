"""Corrections for samples that another policy drew, and for answers that are too long."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from upweight.ops.policy_loss import log_ratio


def importance_weight(old: jax.Array, sampler: jax.Array, trained: jax.Array, cap: float | None = None) -> jax.Array:
    """min(π_old/π_sampler, cap) per token without a gradient; 1 where masked (truncated importance sampling)."""
    weight = jnp.exp(log_ratio(old, sampler, trained))
    return jax.lax.stop_gradient(weight if cap is None else jnp.minimum(weight, cap))


def inside_band(
    old_BA: jax.Array,
    sampler_BA: jax.Array,
    mask_BA: jax.Array,
    band: tuple[float, float],
    *,
    by_sequence: bool = False,
) -> jax.Array:
    """bool [B,A]: where π_old/π_sampler lies in the band, per token or as exp(mean log-ratio) of the row."""
    shift = log_ratio(old_BA, sampler_BA, mask_BA)
    if by_sequence:
        count = jnp.maximum(jnp.sum(mask_BA, axis=1, keepdims=True), 1.0)
        shift = jnp.broadcast_to(jnp.sum(shift, axis=1, keepdims=True) / count, shift.shape)
    ratio = jnp.exp(shift)
    return (ratio >= band[0]) & (ratio <= band[1])


def overlong_punishment(length: jax.Array, limit: int, buffer: int) -> jax.Array:
    """0 up to limit − buffer tokens, then falling to −1 at the limit and beyond (DAPO, Yu et al. 2025)."""
    over = jnp.asarray(length, jnp.float32) - (limit - buffer)
    return -jnp.clip(over / buffer, 0.0, 1.0)
