"""Rewards over time → returns and advantages, in float32 (JAX). Each function is compiled once per shape.

Axes: B rows, A actions. Masked places (tool output inside an answer, prompt, padding) are no time steps: the running value
passes through them undiscounted, and what they hold has no influence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from upweight.ops.masked_stats import masked


@jax.jit
def discounted_returns(
    rewards_BA: jax.Array, mask_BA: jax.Array, gamma: jax.Array | float, dones_BA: jax.Array | None = None
) -> jax.Array:
    """R_t = r_t + γ(1 − d_t)R_{t+1} over the unmasked places, 0 at masked ones; float32 [B,A]."""
    rewards, dones = _prepared(rewards_BA, mask_BA), _prepared(dones_BA, mask_BA)

    def step(after: jax.Array, now: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, done, active = now
        here = reward + gamma * (1.0 - done) * after
        return jnp.where(active > 0, here, after), here

    start = jnp.zeros(rewards.shape[1], jnp.float32)
    _, returns = jax.lax.scan(step, start, (rewards, dones, _turned(mask_BA)), reverse=True)
    return masked(returns.T, mask_BA)


@jax.jit
def gae(
    rewards_BA: jax.Array,
    values: jax.Array,
    mask_BA: jax.Array,
    gamma: jax.Array | float,
    gae_lambda: jax.Array | float,
    dones_BA: jax.Array | None = None,
) -> jax.Array:
    """δ_t = r_t + γ(1 − d_t)v_{t+1} − v_t; A_t = δ_t + γλ(1 − d_t)A_{t+1} (Schulman et al. 2016); float32 [B,A], 0 where masked.

    `values` is [B,A], then the episode ends with its last action, or [B,A+1] with the value of what follows.
    """
    rewards, dones = _prepared(rewards_BA, mask_BA), _prepared(dones_BA, mask_BA)
    count = rewards_BA.shape[1]
    values = jnp.asarray(values, jnp.float32)
    own = _prepared(values[:, :count], mask_BA)
    last = values[:, count] if values.shape[1] > count else jnp.zeros(values.shape[0], jnp.float32)

    def step(
        after: tuple[jax.Array, jax.Array], now: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (next_value, next_advantage), (reward, value, done, active) = after, now
        # Selected, not multiplied: a value after the end may hold anything.
        delta = reward + gamma * jnp.where(done < 1, (1.0 - done) * next_value, 0.0) - value
        here = delta + gamma * gae_lambda * (1.0 - done) * next_advantage
        kept = jnp.where(active > 0, value, next_value), jnp.where(active > 0, here, next_advantage)
        return kept, here

    start = (last, jnp.zeros_like(last))
    _, advantages = jax.lax.scan(step, start, (rewards, own, dones, _turned(mask_BA)), reverse=True)
    return masked(advantages.T, mask_BA)


def at_last_action(reward_B: jax.Array, mask_BA: jax.Array) -> jax.Array:
    """The reward of each row at its last unmasked place, 0 elsewhere; float32 [B,A]. A row without one holds zeros only."""
    active = mask_BA > 0
    is_last = active & (jnp.cumsum(active[:, ::-1], axis=1)[:, ::-1] == 1)
    return jnp.where(is_last, jnp.asarray(reward_B, jnp.float32)[:, None], 0.0)


def _prepared(x_BA: jax.Array | None, mask_BA: jax.Array) -> jax.Array:
    """Time first, as a scan wants it; 0 where masked or absent."""
    if x_BA is None:
        return jnp.zeros(mask_BA.shape[::-1], jnp.float32)
    return masked(jnp.asarray(x_BA, jnp.float32), mask_BA).T


def _turned(mask_BA: jax.Array) -> jax.Array:
    return jnp.asarray(mask_BA, jnp.float32).T
