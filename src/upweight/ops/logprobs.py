"""Log-probs of given tokens without ever keeping the logits of all positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 256


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

    def one(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, target, temperature = chunk
        logits = jnp.einsum("nh,vh->nv", hidden, head_VH, preferred_element_type=jnp.float32)
        logits = (cap * jnp.tanh(logits / cap) if cap else logits) / temperature[:, None]
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return chosen - total, _entropy(logits, total) if entropy else jnp.zeros_like(total)

    count = hidden_NH.shape[0]
    if count <= CHUNK:
        logprobs, spread = one((hidden_NH, target_N, temperature_N))
    else:
        inputs = (hidden_NH, target_N, temperature_N)
        chunks = jax.tree.map(lambda x: _whole_chunks(x).reshape(-1, CHUNK, *x.shape[1:]), inputs)
        logprobs, spread = jax.tree.map(lambda x: x.reshape(-1)[:count], jax.lax.map(jax.checkpoint(one), chunks))
    return logprobs, spread if entropy else None


def _whole_chunks(x: jax.Array) -> jax.Array:
    """Fills up the last chunk with copies of the last entry (a temperature of 0 would not be finite)."""
    missing = -x.shape[0] % CHUNK
    return jnp.concatenate([x, jnp.repeat(x[-1:], missing, axis=0)]) if missing else x


def _entropy(logits: jax.Array, total: jax.Array) -> jax.Array:
    """−Σ p log p per row, with 0·log 0 = 0."""
    logp = logits - total[:, None]
    p = jnp.exp(logp)
    # log p is replaced before the product, so that its −inf reaches neither value nor gradient.
    return -jnp.sum(p * jnp.where(p > 0, logp, 0.0), axis=-1)
