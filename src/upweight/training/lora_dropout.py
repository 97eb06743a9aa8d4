"""Dropout on what a LoRA adapter reads: each input of its first matrix is 0 with the rate's probability, else x/(1 − rate).

The base's own products are untouched, and an adapter that is not wrapped (as in scoring, validation and serving) drops nothing.
What is dropped follows from a key alone, so that a run that goes on draws what it would have drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from upweight.models.layers import Params


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Dropping:
    """Stands for a matrix [in,r] on the right of a product: `x @ Dropping(a, key, rate)` is dropout(x) @ a."""

    matrix: Any
    key: Any  # uint32 [2]
    rate: float

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.wrap_key_data(self.key), 1.0 - self.rate, x.shape)
        grown = x / (1.0 - self.rate) if self.rate < 1 else x
        return jnp.where(kept, grown, 0.0).astype(x.dtype) @ self.matrix

    def tree_flatten(self) -> tuple[tuple[Any, Any], float]:
        return (self.matrix, self.key), self.rate

    @classmethod
    def tree_unflatten(cls, rate: float, children: tuple[Any, Any]) -> Dropping:
        return cls(*children, rate)


def dropping(adapter: Params, key: jax.Array, rate: float) -> Params:
    """The adapter for one forward pass, each matrix of each layer with draws of its own; itself at rate 0. `key` uint32 [2]."""
    if rate == 0:
        return adapter
    layers = []
    for number, layer in enumerate(adapter["layers"]):
        own = jax.random.fold_in(jax.random.wrap_key_data(key), number)
        keys = jax.random.key_data(jax.random.split(own, len(layer)))
        pairs = zip(keys, layer.items(), strict=True)
        layers.append({name: {**low, "a": Dropping(low["a"], k, rate)} for k, (name, low) in pairs})
    return {**adapter, "layers": layers}


def key_of(seed: int, version: int, piece: int) -> jax.Array:
    """uint32 [2]: of one micro-batch of the batch that makes version + 1."""
    key = jax.random.fold_in(jax.random.key(seed), version)
    return jax.random.key_data(jax.random.fold_in(key, piece))
