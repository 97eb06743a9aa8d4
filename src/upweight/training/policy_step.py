"""The compiled parts of a policy update: gradient of one micro-batch, scoring.

Pure functions; the `make_…` functions close over what is static and are compiled once per shape of the packed batch. Every
sum is divided by a count over the whole batch that comes with the data, so gradients and metrics of micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from upweight.models.config import DecoderConfig
from upweight.models.decoder import forward_hidden
from upweight.models.layers import Params, logits_of
from upweight.ops.corrections import importance_weight
from upweight.ops.logprobs import hidden_scores
from upweight.ops.masked_stats import masked
from upweight.ops.policy_loss import (
    AGGREGATIONS,
    CLIPPED,
    KL_ESTIMATORS,
    LOSSES,
    RATIO_LEVELS,
    Limits,
    log_ratio,
    sequence_ratio,
)
from upweight.ops.value_loss import squared_error
from upweight.training.critic import values_of
from upweight.training.pieces import stacked, unstacked
from upweight.training.settings import PolicySettings

Metrics = dict[str, jax.Array]


class Trained(NamedTuple):
    """What an update changes; trees of arrays."""

    policy: Params  # all parameters, or the adapter
    critic: Params | None = None  # the value head of ppo


class Fixed(NamedTuple):
    """What it reads beside; None where there is none."""

    base: Params | None = None  # under an adapter
    start: Params | None = None  # the start model, when the whole of its distribution is needed


class TargetScores(NamedTuple):
    """At the targets, float32 [N]; None where not asked for."""

    logprob: jax.Array
    entropy: jax.Array | None = None
    kl: jax.Array | None = None  # Σ π(log π − log π_start)
    value: jax.Array | None = None


class Packed(NamedTuple):
    """`ops.packing.PackedBatch` with the per-target numbers of the loss, as a compiled step takes it; N targets."""

    tokens: jax.Array  # int32 [R,T]
    positions: jax.Array  # int32 [R,T]
    block: jax.Array  # int32 [R,T]
    segment: jax.Array  # int32 [R,T]
    query: jax.Array  # int32 [N]
    target: jax.Array  # int32 [N]
    sample: jax.Array  # int32 [N]
    trained: jax.Array  # float32 [N]
    temperature: jax.Array  # float32 [N]
    advantage: jax.Array  # float32 [N]
    behaviour: jax.Array  # float32 [N], log-probs of the sampler on this support; NaN where unknown
    old: jax.Array  # float32 [N], of the policy before this batch's first update; NaN = the present one
    reference: jax.Array  # float32 [N], of the start model; NaN when no KL is asked for, or the exact one
    returns: jax.Array  # float32 [N], what the critic is to tell; NaN without one
    divisor: jax.Array  # float32 [], of the loss aggregation, over the whole batch
    num_trained: jax.Array  # float32 [], trained tokens of the whole batch


def allowed_mask(block_RT: jax.Array, segment_RT: jax.Array) -> jax.Array:
    """[R,T,T]: not later, same block, and context or own segment."""
    length = block_RT.shape[1]
    same_block = block_RT[:, :, None] == block_RT[:, None, :]
    visible = (segment_RT[:, None, :] == 0) | (segment_RT[:, :, None] == segment_RT[:, None, :])
    return jnp.tril(jnp.ones((length, length), bool)) & same_block & visible


def target_scores(
    config: DecoderConfig,
    settings: PolicySettings,
    trained: Trained,
    fixed: Fixed,
    packed: Packed,
    *,
    remat: bool,
    entropy: bool = False,
) -> TargetScores:
    """Of the present policy; with the KL where `fixed` holds a start model, and values where there is a critic."""
    mask = allowed_mask(packed.block, packed.segment)

    def states(params: Params, lora: Params | None, scale: float) -> jax.Array:
        hidden = forward_hidden(config, params, packed.tokens, packed.positions, mask, lora, scale, remat)
        return hidden.reshape(-1, hidden.shape[-1])[packed.query]

    params, lora, scale = split_trainable(settings, trained.policy, fixed.base)
    hidden = states(params, lora, scale)
    reference = None
    if (start := fixed.start) is not None:
        others = jax.lax.stop_gradient(states(start, None, 1.0))
        reference = (lambda h: logits_of(config, start, h)), others
    scores = hidden_scores(
        lambda h: logits_of(config, params, h),
        hidden,
        packed.target,
        packed.temperature,
        entropy=entropy,
        reference=reference,
    )
    value = None if trained.critic is None else values_of(trained.critic, hidden)
    return TargetScores(scores.logprob, scores.entropy, scores.kl, value)


def policy_loss(
    settings: PolicySettings, num_samples: int, packed: Packed, scores: TargetScores
) -> tuple[jax.Array, Metrics]:
    """The scalar loss of one packed batch and its metrics, from the scores of the policy being trained."""
    preset, trained, lp = settings.preset, packed.trained, scores.logprob
    present = jax.lax.stop_gradient(lp)
    old = jnp.where(jnp.isnan(packed.old), present, packed.old)
    behaviour = jnp.where(jnp.isnan(packed.behaviour), old, packed.behaviour)
    ratio_against = behaviour if settings.correction == "none" else old
    limits = Limits(low=preset.clip_low, high=preset.clip_high, dual_clip=preset.dual_clip, num_samples=num_samples)
    per_token = LOSSES[preset.loss](lp, ratio_against, packed.advantage, trained, packed.sample, limits)
    weight = None
    if settings.correction != "none":  # what lies outside the band of masked is not among the targets
        cap = settings.is_cap if settings.correction == "truncated" else None
        weight = importance_weight(old, behaviour, trained, cap)
        per_token = per_token * weight
    kl = _kl(settings, packed, scores)
    if kl is not None:
        per_token = per_token + settings.beta * kl
    if scores.entropy is not None:
        per_token = per_token - settings.entropy_coeff * masked(scores.entropy, trained)
    numerator = AGGREGATIONS[preset.aggregation].numerator(per_token, trained, packed.sample, num_samples)
    metrics = _ratio_metrics(preset.loss, limits, packed, present, ratio_against)
    for name, x in (("kl", kl), ("entropy", scores.entropy), ("is_weight_mean", weight)):
        if x is not None:
            metrics[name] = jnp.sum(masked(x, trained)) / packed.num_trained
    return numerator / packed.divisor, jax.lax.stop_gradient(metrics)


def _kl(settings: PolicySettings, packed: Packed, scores: TargetScores) -> jax.Array | None:
    """Of the loss, per target; None when it has none."""
    if not settings.kl_in_loss:
        return None
    if settings.exact_kl:
        assert scores.kl is not None
        return masked(scores.kl, packed.trained)
    return KL_ESTIMATORS[settings.preset.kl_estimator](scores.logprob, packed.reference, packed.trained)


def critic_loss(packed: Packed, value: jax.Array) -> jax.Array:
    """Mean of (V − R)² over the trained tokens of the whole optimizer batch."""
    kept = masked(value, packed.trained), masked(packed.returns, packed.trained)
    return jnp.sum(squared_error(*kept)) / packed.num_trained


def _ratio_metrics(loss: str, limits: Limits, packed: Packed, lp: jax.Array, against: jax.Array) -> Metrics:
    """How far the policy is from the one that the ratio is against; the ratio is the one that the loss takes, if any."""
    trained = packed.trained

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(masked(x, trained)) / packed.num_trained

    shift = log_ratio(lp, against, trained)
    metrics = {"logprob_mean": mean(lp), "approx_kl": mean(jnp.exp(shift) - 1.0 - shift)}
    if loss not in RATIO_LEVELS:
        return metrics
    level, ratio = RATIO_LEVELS[loss], jnp.exp(shift)
    if level != "token":
        ratio = sequence_ratio(lp, against, trained, packed.sample, limits, level)
    metrics |= {"ratio_mean": mean(ratio), "ratio_max": jnp.max(masked(ratio, trained))}
    if loss in CLIPPED:
        metrics["clip_fraction_low"] = mean((ratio < 1 - limits.low).astype(jnp.float32))
        metrics["clip_fraction_high"] = mean((ratio > 1 + limits.high).astype(jnp.float32))
    return metrics


def split_trainable(
    settings: PolicySettings, trainable: Params, frozen: Params | None
) -> tuple[Params, Params | None, float]:
    """(parameters, adapter, adapter scale) of a forward pass."""
    if settings.lora is None:
        return trainable, None, 1.0
    assert frozen is not None
    return frozen, trainable, settings.lora.scale


def make_gradient(
    config: DecoderConfig, settings: PolicySettings, num_samples: int, *, remat: bool
) -> Callable[[Trained, Fixed, Packed], tuple[Trained, Metrics, jax.Array]]:
    """Compiled (trained, fixed, packed) → (gradients, metrics, log-probs [N]). The two losses share no parameter."""

    def loss_fn(trained: Trained, fixed: Fixed, packed: Packed) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        wanted = settings.entropy_coeff > 0
        scores = target_scores(config, settings, trained, fixed, packed, remat=remat, entropy=wanted)
        loss, metrics = policy_loss(settings, num_samples, packed, scores)
        metrics["loss"] = jax.lax.stop_gradient(loss)
        if scores.value is not None:
            value_loss = critic_loss(packed, scores.value)
            loss, metrics = loss + value_loss, metrics | {"value_loss": jax.lax.stop_gradient(value_loss)}
        return loss, (metrics, scores.logprob)

    def gradient(trained: Trained, fixed: Fixed, packed: Packed) -> tuple[Trained, Metrics, jax.Array]:
        grads, (metrics, lp) = jax.grad(loss_fn, has_aux=True)(trained, fixed, packed)
        return grads, metrics, lp

    program = jax.jit(gradient)

    def over_stacked(trained: Trained, fixed: Fixed, packed: Packed) -> tuple[Trained, Metrics, jax.Array]:
        grads, metrics, lp = program(*_stacked(settings, trained, fixed), packed)
        return (grads if settings.lora else grads._replace(policy=unstacked(grads.policy))), metrics, lp

    return over_stacked


def make_score(config: DecoderConfig, settings: PolicySettings) -> Callable[[Trained, Fixed, Packed], TargetScores]:
    """Compiled (trained, fixed, packed) → scores, no gradient."""

    def score(trained: Trained, fixed: Fixed, packed: Packed) -> TargetScores:
        return target_scores(config, settings, trained, fixed, packed, remat=False)

    program = jax.jit(score)
    return lambda trained, fixed, packed: program(*_stacked(settings, trained, fixed), packed)


def _stacked(settings: PolicySettings, trained: Trained, fixed: Fixed) -> tuple[Trained, Fixed]:
    """With layers as the scan takes them; an adapter is small and stays as it is."""
    policy = trained.policy if settings.lora else stacked(trained.policy)
    return trained._replace(policy=policy), Fixed(*(None if params is None else stacked(params) for params in fixed))
