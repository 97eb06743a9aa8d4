"""Arrays of modules as plain trees, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from upweight.errors import TrainingError


def snapshot(module: nnx.Pytree, *, copy: bool = True) -> dict[str, Any]:
    """Path → copy of the array, or the array itself, for every variable. Keys of random streams are kept as their data."""
    return {
        jax.tree_util.keystr(path): _plain(leaf, copy)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(module))
    }


def restore(module: nnx.Pytree, saved: dict[str, Any]) -> None:
    """Puts a copy of a snapshot back; `TrainingError` naming the first array that does not fit, then nothing is changed."""
    check_fits(module, saved)
    paths, form = jax.tree_util.tree_flatten_with_path(nnx.state(module))
    leaves = [_like(leaf, saved[jax.tree_util.keystr(path)]) for path, leaf in paths]
    nnx.update(module, jax.tree.unflatten(form, leaves))


def check_fits(module: nnx.Pytree, saved: Mapping[str, Any]) -> None:
    """`TrainingError` when the module has not exactly the arrays of a snapshot, or of what is known of their shapes."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(module))
    shapes = {jax.tree_util.keystr(path): _shape(leaf) for path, leaf in leaves}
    for name in sorted(set(shapes) ^ saved.keys()):
        here = "has no place" if name in saved else "is missing"
        raise TrainingError(
            f"{type(module).__name__} state{name} {here}: build the trainer with the model it was saved from"
        )
    for name, shape in shapes.items():
        given = tuple(saved[name].shape)
        if given != shape:
            raise TrainingError(f"{type(module).__name__} state{name} has shape {given}, the trainer needs {shape}")


def _shape(leaf: Any) -> tuple[int, ...]:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return tuple(jax.eval_shape(jax.random.key_data, leaf).shape if is_key else leaf.shape)


def _plain(leaf: Any, copy: bool) -> jax.Array:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    plain = jax.random.key_data(leaf) if is_key else leaf
    return jnp.array(plain, copy=True) if copy else jnp.asarray(plain)


def _like(leaf: Any, new: Any) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(new), impl=jax.random.key_impl(leaf))
    return jnp.array(new, leaf.dtype, copy=True)
