"""Arrays of modules as plain trees, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from upweight.errors import TrainingError


def snapshot(module: nnx.Pytree) -> dict[str, Any]:
    """Path → copy of the array, for every variable. Keys of random streams are kept as their data."""
    return {
        jax.tree_util.keystr(path): _plain(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(module))
    }


def restore(module: nnx.Pytree, saved: dict[str, Any]) -> None:
    """Puts a copy of a snapshot back; `TrainingError` naming the first array that does not fit, then nothing is changed."""
    paths, form = jax.tree_util.tree_flatten_with_path(nnx.state(module))
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    for name in sorted(set(names) ^ saved.keys()):
        here = "has no place" if name in saved else "is missing"
        raise TrainingError(
            f"{type(module).__name__} state{name} {here}: build the trainer with the model it was saved from"
        )
    leaves = []
    for name, (_, leaf) in zip(names, paths, strict=True):
        new = saved[name]
        if jnp.shape(new) != jnp.shape(_plain(leaf)):
            raise TrainingError(
                f"{type(module).__name__} state{name} has shape {jnp.shape(new)}, the trainer needs {jnp.shape(leaf)}"
            )
        leaves.append(_like(leaf, new))
    nnx.update(module, jax.tree.unflatten(form, leaves))


def _plain(leaf: Any) -> jax.Array:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jnp.array(jax.random.key_data(leaf) if is_key else leaf, copy=True)


def _like(leaf: Any, new: Any) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(new), impl=jax.random.key_impl(leaf))
    return jnp.array(new, leaf.dtype, copy=True)
