"""A plain decoder of 58.1 million parameters in Flax NNX, the same for every trainer that is measured.

It is called as `model(tokens)` and gives logits, or logits and values with a critic. `hidden_states`, `head` and `value_head` are the
same arithmetic in halves, for trainers that ask for them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 8, 512, 8, 1376, 32000


def rotated(x_BSND: jax.Array) -> jax.Array:
    """Rotary positions, halves of the head size against each other."""
    length, half = x_BSND.shape[1], x_BSND.shape[3] // 2
    angles = jnp.arange(length)[:, None] / 10000 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = jnp.split(x_BSND, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        def linear(inner: int, outer: int) -> nnx.Linear:
            return nnx.Linear(inner, outer, use_bias=False, rngs=rngs)

        self.attention_norm, self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = linear(WIDTH, INNER), linear(WIDTH, INNER), linear(INNER, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        normed = self.attention_norm(x)
        q, k, v = (project(normed).reshape(shape) for project in (self.q, self.k, self.v))
        scores = jnp.einsum("bqnd,bknd->bnqk", rotated(q), rotated(k)) / jnp.sqrt(WIDTH // HEADS)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        x = x + self.o(jnp.einsum("bnqk,bknd->bqnd", weights, v).reshape(x.shape))
        normed = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(normed)) * self.up(normed))


class Decoder(nnx.Module):
    def __init__(self, seed: int, *, critic: bool = False) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)
        self.critic = nnx.Linear(WIDTH, 1, rngs=rngs) if critic else None

    def hidden_states(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def head(self, hidden: jax.Array) -> jax.Array:
        return self.out(hidden)

    def value_head(self, hidden: jax.Array) -> jax.Array:
        assert self.critic is not None
        return self.critic(hidden)

    def __call__(self, tokens: jax.Array) -> Any:
        hidden = self.hidden_states(tokens)
        logits = self.out(hidden)
        return logits if self.critic is None else (logits, self.critic(hidden)[..., 0])
