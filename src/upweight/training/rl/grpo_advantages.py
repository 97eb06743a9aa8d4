"""Rewards of a grouped rollout → one advantage for each action, and which actions are trained."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from upweight.ops.corrections import inside_band, overlong_punishment
from upweight.ops.grouped_advantages import contiguous_stats, grouped_advantages
from upweight.ops.masked_stats import masked
from upweight.ops.policy_loss import KL_ESTIMATORS
from upweight.ops.returns import at_last_action, discounted_returns
from upweight.training.rl.compiled import Metrics
from upweight.training.rl.configs import GRPOConfig
from upweight.training.rl.rollouts import GroupRolloutBatch, SequenceRolloutBatch


def normalized_rewards(rewards: jax.Array, group_size: int, ddof: int, eps: float) -> jax.Array:
    """(r − mean)/(std + eps) per group, float32 (B,)."""
    stats, _ = contiguous_stats(rewards, jnp.ones(rewards.shape), group_size, ddof=ddof)
    rows = rewards.astype(jnp.float32).reshape(-1, group_size)
    return jnp.where(stats.flat, 0.0, (rows - stats.mean) / (stats.std + eps)).reshape(-1)


def trained_mask(
    config: GRPOConfig,
    rollout: SequenceRolloutBatch,
    mask: jax.Array,
    old: jax.Array | None,
    sampler: jax.Array | None,
) -> jax.Array:
    """The action mask without answers of full length (`overlong` mask) and what lies outside the band `is_mask`."""
    if config.overlong == "mask":
        assert config.overlong_length is not None
        short = jnp.sum(mask, axis=1, keepdims=True) < config.overlong_length
        mask = jnp.where(short, mask, 0.0)
    if config.is_mask is not None and old is not None and sampler is not None:
        inside = inside_band(old, sampler, mask, config.is_mask, by_sequence=config.is_mask_level == "sequence")
        mask = jnp.where(inside, mask, 0.0)
    return mask


def group_advantages(
    config: GRPOConfig,
    batch: GroupRolloutBatch[Any],
    mask: jax.Array,
    kept: jax.Array,
    old: jax.Array | None,
    reference: jax.Array | None,
) -> tuple[jax.Array, jax.Array, Metrics]:
    """float32 (B,A) before any whitening over the batch; what of `kept` stays to be trained; and the metrics of the whole batch.

    `mask` is that of the rollout, `kept` what of it is trained; with `filter_flat_groups` those groups leave it.
    """
    rollout = batch.rollout
    if rollout.advantages is not None:
        advantages = masked(rollout.advantages.astype(jnp.float32), mask)
        return advantages, kept, _spread(advantages, mask)
    valid = jnp.ones(rollout.batch_size) if rollout.valid is None else (rollout.valid != 0).astype(jnp.float32)
    rewards = masked(rollout.sequence_rewards.astype(jnp.float32), valid)
    if config.overlong == "soft":
        assert config.overlong_length is not None
        length = jnp.sum(mask, axis=1)
        rewards = rewards + overlong_punishment(length, config.overlong_length, config.overlong_buffer)
    kl = jnp.zeros_like(mask)
    if config.kl_in_reward and config.kl_coeff > 0 and old is not None and reference is not None:
        estimator = KL_ESTIMATORS["k1" if config.kl_estimator == "exact" else config.kl_estimator]
        kl = config.kl_coeff * estimator(old, reference, mask)
    if config.advantage in ("reinforce_pp", "returns"):
        per_token = discounted_returns(at_last_action(rewards, mask) - kl, mask, 1.0)
        return per_token, kept, _spread(per_token, kept)
    rewards = rewards - jnp.sum(kl, axis=1)
    name, batch_std = _formula(config)
    found = grouped_advantages(name, rewards, valid, batch.group_size, ddof=config.std_ddof, batch_std=batch_std)
    metrics = {"zero_variance_groups": jnp.sum(found.flat).astype(jnp.float32)}
    advantages = found.advantages[:, None] * mask
    if config.filter_flat_groups:
        kept = jnp.where(jnp.repeat(found.flat, batch.group_size)[:, None], 0.0, kept)
    return advantages, kept, metrics | _spread(found.advantages, valid)


def _formula(config: GRPOConfig) -> tuple[str, bool]:
    """Name of the grouped formula, and whether its std is that of the batch."""
    if config.advantage == "rloo":
        return "rloo", False
    if config.advantage == "reinforce_pp_baseline" or config.scale_rewards == "none":
        return "group_centered", False
    return "group", config.scale_rewards == "batch"


def _spread(advantages: jax.Array, counts: jax.Array) -> Metrics:
    total = jnp.maximum(jnp.sum(counts), 1.0)
    mean = jnp.sum(masked(advantages, counts)) / total
    variance = jnp.sum(masked(jnp.square(advantages - mean), counts)) / total
    return {"advantages_mean": mean, "advantages_std": jnp.sqrt(variance)}
