"""The compiled parts of an update on rows of a file: gradients of cross-entropy and of preference losses.

As in `policy_step`, sums are divided by counts over the whole batch that come with the data, so micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from upweight.models.config import DecoderConfig
from upweight.models.decoder import forward_hidden
from upweight.models.layers import Params, head_matrix
from upweight.ops.logprobs import Scores, hidden_scores
from upweight.ops.masked_stats import masked
from upweight.ops.preference_loss import MEAN_SCORES, PAIR_LOSSES, PairSettings
from upweight.training.lora_dropout import dropping
from upweight.training.pieces import stacked, unstacked
from upweight.training.policy_step import Metrics, allowed_mask, split_trainable
from upweight.training.settings import PolicySettings

Gradient = Callable[[Params, Params | None, "Layout", Any], tuple[Params, Metrics]]


class Layout(NamedTuple):
    """Packed rows of R·T tokens with N targets."""

    tokens: jax.Array  # int32 [R,T]
    positions: jax.Array  # int32 [R,T]
    block: jax.Array  # int32 [R,T]
    segment: jax.Array  # int32 [R,T]
    query: jax.Array  # int32 [N]
    target: jax.Array  # int32 [N]
    trained: jax.Array  # float32 [N], 0 on padding


class Supervision(NamedTuple):
    num_tokens: jax.Array  # float32 [], trained tokens of the whole batch
    key: jax.Array  # uint32 [2], of what this micro-batch drops


class Pairs(NamedTuple):
    """Which targets belong to which answer of P pairs: answer 2p is the preferred one of pair p, 2p + 1 the other."""

    slot: jax.Array  # int32 [N]
    targets: jax.Array  # float32 [2P], targets of each answer
    reference: jax.Array  # float32 [2P], scores under the start model
    weight: jax.Array  # float32 [P], 0 on padding
    num_pairs: jax.Array  # float32 [], of the whole batch


def scores(
    config: DecoderConfig,
    settings: PolicySettings,
    trainable: Params,
    frozen: Params | None,
    layout: Layout,
    *,
    remat: bool,
    hits: bool = False,
    drop: Callable[[Params], Params] = lambda adapter: adapter,
) -> Scores:
    """Log-probs at the targets, and with `hits` whether no other token is likelier; `drop` is for the adapter, if there is one."""
    params, lora, scale = split_trainable(settings, trainable, frozen)
    lora = None if lora is None else drop(lora)
    mask = allowed_mask(layout.block, layout.segment)
    hidden = forward_hidden(config, params, layout.tokens, layout.positions, mask, lora, scale, remat)
    matrix, cap = head_matrix(params), config.final_softcap

    def head(hidden_NH: jax.Array) -> jax.Array:
        logits = jnp.einsum("nh,vh->nv", hidden_NH, matrix, preferred_element_type=jnp.float32)
        return cap * jnp.tanh(logits / cap) if cap else logits

    at_targets = hidden.reshape(-1, hidden.shape[-1])[layout.query]
    return hidden_scores(head, at_targets, layout.target, jnp.ones(layout.target.shape), hits=hits)


def make_supervised_gradient(
    config: DecoderConfig, settings: PolicySettings, *, remat: bool, lora_dropout: float = 0.0
) -> Gradient:
    """Compiled (trainable, frozen, layout, supervision) → (gradient, metrics).

    loss = −Σ log p(target) / tokens.
    """

    def loss_fn(
        trainable: Params, frozen: Params | None, layout: Layout, given: Supervision
    ) -> tuple[jax.Array, Metrics]:
        def drop(adapter: Params) -> Params:
            return dropping(adapter, given.key, lora_dropout)

        found = scores(config, settings, trainable, frozen, layout, remat=remat, hits=True, drop=drop)
        assert found.hit is not None
        loss = -jnp.sum(masked(found.logprob, layout.trained)) / given.num_tokens
        right = jnp.sum(masked(found.hit, layout.trained)) / given.num_tokens
        return loss, jax.lax.stop_gradient({"loss": loss, "token_accuracy": right})

    return _over_stacked(settings, loss_fn)


def make_preference_gradient(
    config: DecoderConfig, settings: PolicySettings, loss: str, pair_settings: PairSettings, *, means: bool, remat: bool
) -> Gradient:
    """Compiled (trainable, frozen, layout, pairs) → (gradient, metrics); the loss is the mean over pairs."""
    beta = pair_settings.beta

    def loss_fn(trainable: Params, frozen: Params | None, layout: Layout, pairs: Pairs) -> tuple[jax.Array, Metrics]:
        found = scores(config, settings, trainable, frozen, layout, remat=remat)
        sums = jax.ops.segment_sum(masked(found.logprob, layout.trained), pairs.slot, pairs.targets.shape[0])
        ratios = (sums / jnp.maximum(pairs.targets, 1.0) if means else sums) - pairs.reference
        chosen, rejected = ratios[0::2], ratios[1::2]
        margin = chosen - rejected

        def mean(of_pairs: jax.Array) -> jax.Array:
            return jnp.sum(masked(of_pairs, pairs.weight)) / pairs.num_pairs

        value = mean(PAIR_LOSSES[loss](margin, pair_settings))
        metrics = {
            "loss": value,
            "margin": mean(margin),
            "reward_accuracy": mean((margin > 0).astype(jnp.float32)),
            "rewards_chosen": beta * mean(chosen),
            "rewards_rejected": beta * mean(rejected),
        }
        return value, jax.lax.stop_gradient(metrics)

    return _over_stacked(settings, loss_fn)


def _over_stacked(settings: PolicySettings, loss_fn: Callable[..., tuple[jax.Array, Metrics]]) -> Gradient:
    """The compiled gradient; layers are stacked before and taken apart after it, an adapter's are small and stay as they are."""
    program = jax.jit(jax.grad(loss_fn, has_aux=True))

    def gradient(trainable: Params, frozen: Params | None, layout: Layout, given: Any) -> tuple[Params, Metrics]:
        grads, metrics = program(*_stacked(settings, trainable, frozen), layout, given)
        return (grads if settings.lora else unstacked(grads)), metrics

    return gradient


def scores_are_means(loss: str, length_normalized: bool) -> bool:
    return length_normalized or loss in MEAN_SCORES


def make_row_score(
    config: DecoderConfig, settings: PolicySettings
) -> Callable[[Params, Params | None, Layout], Scores]:
    """Compiled (trainable, frozen, layout) → scores, no gradient."""

    def score(trainable: Params, frozen: Params | None, layout: Layout) -> Scores:
        return scores(config, settings, trainable, frozen, layout, remat=False, hits=True)

    program = jax.jit(score)

    def over_stacked(trainable: Params, frozen: Params | None, layout: Layout) -> Scores:
        return program(*_stacked(settings, trainable, frozen), layout)

    return over_stacked


def _stacked(settings: PolicySettings, trainable: Params, frozen: Params | None) -> tuple[Params, Params | None]:
    return (trainable if settings.lora else stacked(trainable)), None if frozen is None else stacked(frozen)
