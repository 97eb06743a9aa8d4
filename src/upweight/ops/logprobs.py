"""Log-probs of given tokens, and what else logits say, without ever keeping the logits of all positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 256


class Scores(NamedTuple):
    """Of N choices of a token, float32 [N]; None where not asked for."""

    logprob: jax.Array  # log_softmax(L / T)[target]
    entropy: jax.Array | None = None  # −Σ p log p, with 0·log 0 = 0
    kl: jax.Array | None = None  # Σ p (log p − log q), q of the reference logits
    hit: jax.Array | None = None  # 1 where the target is the likeliest token, the first of equals


def target_logprobs(
    hidden_NH: jax.Array,
    head_VH: jax.Array,
    target_N: jax.Array,
    temperature_N: jax.Array,
    *,
    entropy: bool = False,
    cap: float = 0.0,
) -> tuple[jax.Array, jax.Array | None]:
    """log_softmax(L / T)[target], L = hidden·headᵀ (cap·tanh(L / cap) with a cap), and on demand its entropy; float32 [N].

    Works through chunks of 256 positions; with more than one chunk the backward pass computes each chunk's logits again.
    """

    def head(hidden: jax.Array) -> jax.Array:
        logits = jnp.einsum("nh,vh->nv", hidden, head_VH, preferred_element_type=jnp.float32)
        return cap * jnp.tanh(logits / cap) if cap else logits

    scores = hidden_scores(head, hidden_NH, target_N, temperature_N, entropy=entropy)
    return scores.logprob, scores.entropy


def hidden_scores(
    head: Callable[[jax.Array], jax.Array],
    hidden_NH: jax.Array,
    target_N: jax.Array,
    temperature_N: jax.Array,
    *,
    entropy: bool = False,
    reference: tuple[Callable[[jax.Array], jax.Array], jax.Array] | None = None,
    hits: bool = False,
) -> Scores:
    """Scores of the logits `head(hidden)` [n,V], in chunks as `target_logprobs`; `reference` is another head and its hidden
    states [N,H'], from which the KL is taken."""

    def one(chunk: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]) -> Scores:
        hidden, target, temperature, other = chunk
        others = None if reference is None or other is None else reference[0](other)
        return logit_scores(head(hidden), target, temperature, entropy=entropy, reference_NV=others, hits=hits)

    count = hidden_NH.shape[0]
    inputs = (hidden_NH, target_N, temperature_N, None if reference is None else reference[1])
    if count <= CHUNK:
        return one(inputs)
    # A chunk takes every n-th position, so that positions which devices have split among them are split in each chunk.
    chunks = jax.tree.map(lambda x: _whole_chunks(x).reshape(CHUNK, -1, *x.shape[1:]).swapaxes(0, 1), inputs)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1)[:count], jax.lax.map(jax.checkpoint(one), chunks))


def logit_scores(
    logits_NV: jax.Array,
    target_N: jax.Array,
    temperature_N: jax.Array,
    *,
    entropy: bool = False,
    reference_NV: jax.Array | None = None,
    hits: bool = False,
) -> Scores:
    """Scores of given logits; those of the reference are divided by the same temperature and carry no gradient."""
    logits = logits_NV.astype(jnp.float32) / temperature_N[:, None]
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, target_N[:, None], axis=-1)[:, 0]
    hit = (jnp.argmax(logits, axis=-1) == target_N).astype(jnp.float32) if hits else None
    if not entropy and reference_NV is None:
        return Scores(chosen - total, hit=hit)
    logp = logits - total[:, None]
    kl = None
    if reference_NV is not None:
        reference = jax.lax.stop_gradient(reference_NV).astype(jnp.float32) / temperature_N[:, None]
        kl = kl_divergences(logp, jax.nn.log_softmax(reference, axis=-1))
    return Scores(chosen - total, entropies(logp) if entropy else None, kl, hit)


def entropies(logp: jax.Array) -> jax.Array:
    """−Σ p log p over the last axis of log-probs, with 0·log 0 = 0."""
    p = jnp.exp(logp)
    # log p is replaced before the product, so that its −inf reaches neither value nor gradient.
    return -jnp.sum(p * jnp.where(p > 0, logp, 0.0), axis=-1)


def kl_divergences(logp: jax.Array, logq: jax.Array) -> jax.Array:
    """Σ p (log p − log q) over the last axis; terms with p = 0 are 0, whatever q is."""
    p = jnp.exp(logp)
    apart = jnp.where(p > 0, logp, 0.0) - jnp.where(p > 0, logq, 0.0)
    return jnp.sum(p * apart, axis=-1)


def _whole_chunks(x: jax.Array) -> jax.Array:
    """Fills up the last chunk with copies of the last entry (a temperature of 0 would not be finite)."""
    missing = -x.shape[0] % CHUNK
    return jnp.concatenate([x, jnp.repeat(x[-1:], missing, axis=0)]) if missing else x
