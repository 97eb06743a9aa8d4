"""The advantages of `advantages` for contiguous groups of one size, as JAX arrays that gradients flow through."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from upweight.ops.advantages import FORMULAS, GroupStats, is_flat
from upweight.ops.masked_stats import masked


class Grouped(NamedTuple):
    advantages: jax.Array  # float32 [B], 0 for rows that do not count
    flat: jax.Array  # bool [groups], the group has rows and no variance


def grouped_advantages(
    name: str,
    rewards_B: jax.Array,
    valid_B: jax.Array,
    group_size: int,
    *,
    ddof: int = 0,
    batch_std: bool = False,
) -> Grouped:
    """Formula `name` of `FORMULAS`; mean and std are those of the valid rows of a group.

    `ddof` 1 takes the sample std; with `batch_std` the std is that of all valid rows of the batch.
    """
    stats, flat = contiguous_stats(rewards_B, valid_B, group_size, ddof=ddof)
    rewards = masked(jnp.asarray(rewards_B, jnp.float32), valid_B).reshape(-1, group_size)
    valid = (valid_B > 0).reshape(-1, group_size)
    if batch_std:
        everything, _ = contiguous_stats(rewards_B, valid_B, rewards_B.shape[0], ddof=ddof)
        stats = stats._replace(std=everything.std)
    advantages = FORMULAS[name](rewards, stats, jnp)
    return Grouped(jnp.where(valid, advantages, 0.0).reshape(-1), flat)


def contiguous_stats(
    rewards_B: jax.Array, valid_B: jax.Array, group_size: int, *, ddof: int = 0
) -> tuple[GroupStats, jax.Array]:
    """Statistics per group, each [groups,1], and which groups have rows and no variance, [groups]."""
    valid = (valid_B > 0).reshape(-1, group_size)
    rewards = masked(jnp.asarray(rewards_B, jnp.float32), valid_B).reshape(-1, group_size)
    count = jnp.sum(valid, axis=1, keepdims=True).astype(jnp.float32)
    mean = jnp.sum(rewards, axis=1, keepdims=True) / jnp.maximum(count, 1.0)
    low = jnp.min(jnp.where(valid, rewards, jnp.inf), axis=1, keepdims=True)
    high = jnp.max(jnp.where(valid, rewards, -jnp.inf), axis=1, keepdims=True)
    flat = (count < 1) | (jnp.isfinite(mean) & is_flat(low, high, mean, jnp))
    square = jnp.where(valid, jnp.square(rewards - mean), 0.0)
    variance = jnp.sum(square, axis=1, keepdims=True) / jnp.maximum(count - ddof, 1.0)
    # The root of 0 has no slope, and of a flat group nothing is used.
    std = jnp.sqrt(jnp.where(flat, 1.0, variance))
    return GroupStats(mean, std, count, flat), (flat & (count >= 1))[:, 0]
