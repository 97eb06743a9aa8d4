"""One forward pass of any model, with ids that the model has no row for kept away from it.

Padding may hold any id. Embedding one that is out of range gives NaN, which reaches the gradient of every weight even where the
loss is masked. How many ids there are is known only from the logits; the first call is therefore traced, cleaned and then run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import jaxpr_as_fun

PyTree = Any


class Vocabulary:
    """How many ids a model knows; 0 until its logits were seen. Shared by an adapter and what is bound from it."""

    def __init__(self) -> None:
        self.size = 0


def clean_tokens(tokens_BS: jax.Array, trained_BS: jax.Array, size: int) -> jax.Array:
    """Ids out of range become 0 where they are not trained. A trained one stays, and makes the loss NaN."""
    outside = (tokens_BS < 0) | (tokens_BS >= size)
    return jnp.where(outside & (trained_BS <= 0), 0, tokens_BS)


def forward(
    model: Any,
    function: Callable[[Any, jax.Array], PyTree],
    tokens_BS: jax.Array,
    trained_BS: jax.Array,
    vocabulary: Vocabulary,
    size_of: Callable[[PyTree], int],
) -> PyTree:
    """`function(model, clean tokens)`, which must call the model once and return arrays; `size_of` reads V off their shapes."""
    if vocabulary.size:
        return function(model, clean_tokens(tokens_BS, trained_BS, vocabulary.size))
    is_module = isinstance(model, nnx.Pytree)
    graphdef: Any
    graphdef, state = nnx.split(model) if is_module else (None, ())

    def traced(state: PyTree, tokens: jax.Array) -> tuple[PyTree, PyTree]:
        twin = nnx.merge(graphdef, state) if is_module else model
        out = function(twin, tokens)
        return out, nnx.state(twin) if is_module else ()

    jaxpr, shapes = jax.make_jaxpr(traced, return_shape=True)(state, tokens_BS)
    vocabulary.size = size_of(shapes[0])
    leaves = [*jax.tree.leaves(state), clean_tokens(tokens_BS, trained_BS, vocabulary.size)]
    out, after = jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(jaxpr)(*leaves))
    untouched = set(map(id, jaxpr.jaxpr.invars))
    ends = jaxpr.jaxpr.outvars[len(jax.tree.leaves(out)) :]
    if any(id(end) not in untouched for end in ends):  # counters of random streams, running statistics
        nnx.update(model, after)
    return out
