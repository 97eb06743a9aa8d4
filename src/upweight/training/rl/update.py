"""The update of a model: clipped, and left out when loss or gradient is not finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

NORM_EPS = 1e-8


def global_norm(grads: Any) -> jax.Array:
    """√Σ g² over all arrays, float32 []."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))


def clipped_update(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    grads: Any,
    *,
    max_grad_norm: float | None = None,
    loss: jax.Array | None = None,
    allowed: jax.Array | bool = True,
) -> dict[str, jax.Array]:
    """`optimizer.update(model, g·min(1, max_grad_norm/(‖g‖ + 1e-8)))`, in place; usable in `nnx.jit`.

    A loss or norm that is not finite, or `allowed` False, leaves model and optimizer as they were. Returns `grad_norm`, before
    clipping, and `update_skipped`, 0 or 1.
    """
    norm = global_norm(grads)
    applied = jnp.isfinite(norm) & jnp.asarray(allowed)
    if loss is not None:
        applied = applied & jnp.isfinite(loss)
    if max_grad_norm is not None:
        scale = jnp.minimum(1.0, max_grad_norm / (norm + NORM_EPS))
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    wrt = getattr(optimizer, "wrt", nnx.Param)
    before = nnx.state(model, wrt), nnx.state(optimizer)
    before = jax.tree.map(lambda x: x, before)  # a copy of the tree: the update changes variables in place
    optimizer.update(model, grads)
    after = nnx.state(model, wrt), nnx.state(optimizer)
    kept = jax.tree.map(lambda new, old: jnp.where(applied, new, old), after, before)
    nnx.update(model, kept[0])
    nnx.update(optimizer, kept[1])
    return {"grad_norm": norm, "update_skipped": 1.0 - applied.astype(jnp.float32)}
