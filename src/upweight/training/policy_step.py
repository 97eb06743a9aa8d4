"""The compiled parts of a policy update: gradient of one micro-batch, application, scoring.

Pure functions; the `make_…` functions close over what is static and are compiled once per shape of the packed batch. Every
sum is divided by a count over the whole batch that comes with the data, so gradients and metrics of micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from upweight.models.config import DecoderConfig
from upweight.models.decoder import forward_hidden
from upweight.models.layers import Params, head_matrix
from upweight.ops.logprobs import target_logprobs
from upweight.ops.masked_stats import masked
from upweight.ops.policy_loss import AGGREGATIONS, KL_ESTIMATORS, LOSSES, Limits, log_ratio
from upweight.training.settings import PolicySettings

Metrics = dict[str, jax.Array]


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
    reference: jax.Array  # float32 [N], of the start model; NaN when no KL is asked for
    divisor: jax.Array  # float32 [], of the loss aggregation, over the whole batch
    num_trained: jax.Array  # float32 [], trained tokens of the whole batch


def allowed_mask(block_RT: jax.Array, segment_RT: jax.Array) -> jax.Array:
    """[R,T,T]: not later, same block, and context or own segment."""
    length = block_RT.shape[1]
    same_block = block_RT[:, :, None] == block_RT[:, None, :]
    visible = (segment_RT[:, None, :] == 0) | (segment_RT[:, :, None] == segment_RT[:, None, :])
    return jnp.tril(jnp.ones((length, length), bool)) & same_block & visible


def packed_logprobs(
    config: DecoderConfig,
    params: Params,
    lora: Params | None,
    lora_scale: float,
    packed: Packed,
    *,
    remat: bool,
    entropy: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probs (and entropies) at the targets, float32 [N]."""
    mask = allowed_mask(packed.block, packed.segment)
    hidden = forward_hidden(config, params, packed.tokens, packed.positions, mask, lora, lora_scale, remat)
    at_targets = hidden.reshape(-1, hidden.shape[-1])[packed.query]
    return target_logprobs(
        at_targets,
        head_matrix(params),
        packed.target,
        packed.temperature,
        entropy=entropy,
        cap=config.final_softcap,
    )


def policy_loss(
    settings: PolicySettings, num_samples: int, packed: Packed, lp: jax.Array, entropy: jax.Array | None
) -> tuple[jax.Array, Metrics]:
    """The scalar loss of one packed batch and its metrics, from the log-probs of the policy being trained."""
    preset, trained = settings.preset, packed.trained
    present = jax.lax.stop_gradient(lp)
    old = jnp.where(jnp.isnan(packed.old), present, packed.old)
    behaviour = jnp.where(jnp.isnan(packed.behaviour), old, packed.behaviour)
    ratio_against = behaviour if settings.correction == "none" else old
    limits = Limits(low=preset.clip_low, high=preset.clip_high, dual_clip=preset.dual_clip, num_samples=num_samples)
    per_token = LOSSES[preset.loss](lp, ratio_against, packed.advantage, trained, packed.sample, limits)
    off = jnp.exp(log_ratio(old, behaviour, trained))
    if settings.correction == "truncated":
        per_token = per_token * jax.lax.stop_gradient(jnp.minimum(off, settings.is_cap))
    if settings.beta > 0:
        per_token = per_token + settings.beta * KL_ESTIMATORS[preset.kl_estimator](lp, packed.reference, trained)
    if entropy is not None:
        per_token = per_token - settings.entropy_coeff * masked(entropy, trained)
    numerator = AGGREGATIONS[preset.aggregation].numerator(per_token, trained, packed.sample, num_samples)
    return numerator / packed.divisor, _ratio_metrics(settings, packed, lp, ratio_against, off, entropy)


def _ratio_metrics(
    settings: PolicySettings,
    packed: Packed,
    lp: jax.Array,
    against: jax.Array,
    off: jax.Array,
    entropy: jax.Array | None,
) -> Metrics:
    trained = packed.trained
    count = packed.num_trained
    shift = log_ratio(lp, against, trained)
    ratio = jnp.exp(shift)
    metrics = {
        "logprob_mean": jnp.sum(masked(lp, trained)) / count,
        "ratio_mean": jnp.sum(masked(ratio, trained)) / count,
        "ratio_max": jnp.max(masked(ratio, trained)),
        "approx_kl": jnp.sum(masked(jnp.exp(shift) - 1.0 - shift, trained)) / count,
        "clip_fraction_low": jnp.sum(trained * (ratio < 1 - settings.preset.clip_low)) / count,
        "clip_fraction_high": jnp.sum(trained * (ratio > 1 + settings.preset.clip_high)) / count,
        "is_weight_mean": jnp.sum(masked(off, trained)) / count,
    }
    if settings.beta > 0:
        kl = KL_ESTIMATORS[settings.preset.kl_estimator](lp, packed.reference, trained)
        metrics["kl"] = jnp.sum(kl) / count
    if entropy is not None:
        metrics["entropy"] = jnp.sum(masked(entropy, trained)) / count
    return jax.lax.stop_gradient(metrics)


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
) -> Callable[[Params, Params | None, Packed], tuple[Params, Metrics, jax.Array]]:
    """Compiled (trainable, frozen, packed) → (gradient, metrics, log-probs [N])."""

    def loss_fn(
        trainable: Params, frozen: Params | None, packed: Packed
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        params, lora, scale = split_trainable(settings, trainable, frozen)
        wanted = settings.entropy_coeff > 0
        lp, entropy = packed_logprobs(config, params, lora, scale, packed, remat=remat, entropy=wanted)
        loss, metrics = policy_loss(settings, num_samples, packed, lp, entropy)
        return loss, (metrics | {"loss": jax.lax.stop_gradient(loss)}, lp)

    def gradient(trainable: Params, frozen: Params | None, packed: Packed) -> tuple[Params, Metrics, jax.Array]:
        grads, (metrics, lp) = jax.grad(loss_fn, has_aux=True)(trainable, frozen, packed)
        return grads, metrics, lp

    return jax.jit(gradient)


def make_apply(
    optimizer: optax.GradientTransformation,
) -> Callable[[Params, Any, Params, jax.Array], tuple[Params, Any, jax.Array, jax.Array]]:
    """Compiled (trainable, optimizer state, gradient, loss) → (trainable, state, gradient norm, applied).

    A loss or norm that is not finite leaves trainable and state as they were. State and gradient are donated; parameters never
    are, since an engine may be reading them.
    """

    def apply(
        trainable: Params, state: Any, grads: Params, loss: jax.Array
    ) -> tuple[Params, Any, jax.Array, jax.Array]:
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        def update(_: None) -> tuple[Params, Any]:
            change, new_state = optimizer.update(grads, state, trainable)
            return optax.apply_updates(trainable, change), new_state

        new, new_state = jax.lax.cond(finite, update, lambda _: (trainable, state), None)
        return new, new_state, norm, finite

    return jax.jit(apply, donate_argnums=(1, 2))


def make_score(config: DecoderConfig, settings: PolicySettings) -> Callable[[Params, Params | None, Packed], jax.Array]:
    """Compiled (trainable, frozen, packed) → log-probs [N], no gradient."""

    def score(trainable: Params, frozen: Params | None, packed: Packed) -> jax.Array:
        params, lora, scale = split_trainable(settings, trainable, frozen)
        return packed_logprobs(config, params, lora, scale, packed, remat=False)[0]

    return jax.jit(score)
