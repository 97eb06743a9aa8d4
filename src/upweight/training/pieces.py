"""Work on whole parameter trees, cut into programs of a few layers each that run one after the other.

On a CPU, trainer and engine share one pool of threads. A program with an operation for every array of a model fills the pool with
long tasks, and a decode step beside it, hundreds of short ones, waits for each (up to half a second for SmolLM2's update). Short
programs leave it its turns, and take less time themselves.

Invariants:
* At most one piece runs at a time.
* The pieces depend on the tree's form and shapes alone, so the same trees give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from upweight.models.layers import Params

PIECE_BYTES = 48 << 20


def pieces_of(tree: Any) -> list[list[int]]:
    """Numbers of the leaves that go together: whole layers up to `PIECE_BYTES`, so that equal layers share a program; what is
    outside of lists first."""
    units: dict[str, list[int]] = {"": []}
    sizes: dict[str, int] = {"": 0}
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        ends = [at for at, key in enumerate(path, 1) if isinstance(key, jax.tree_util.SequenceKey)]
        unit = jax.tree_util.keystr(path[: ends[0]]) if ends else ""
        units.setdefault(unit, []).append(number)
        sizes[unit] = sizes.get(unit, 0) + leaf.nbytes
    pieces: list[list[int]] = []
    room = 0
    for unit, numbers in units.items():
        if not numbers:
            continue
        if unit and pieces and room >= sizes[unit]:
            pieces[-1] += numbers
            room -= sizes[unit]
        else:
            pieces.append(list(numbers))
            room = PIECE_BYTES - sizes[unit] if unit else 0
    return pieces


def add_trees(total: Any, more: Any) -> Any:
    """Leaf by leaf; `total` is donated."""
    form: Any = jax.tree.structure(total)
    sums, addends = form.flatten_up_to(total), form.flatten_up_to(more)
    for numbers in pieces_of(total):
        added = _add([sums[i] for i in numbers], [addends[i] for i in numbers])
        for number, array in zip(numbers, jax.block_until_ready(added), strict=True):
            sums[number] = array
    return form.unflatten(sums)


def global_norm(tree: Any) -> jax.Array:
    """√Σ x² over all leaves, float32 []."""
    leaves = jax.tree.leaves(tree)
    sums: list[Any] = [None] * len(leaves)
    for numbers in pieces_of(tree):
        found = jax.block_until_ready(_squares([leaves[i] for i in numbers]))
        for number, value in zip(numbers, found, strict=True):
            sums[number] = value
    return _root(sums)


def stacked(params: Params) -> Params:
    """`layers` as one tree of arrays with a leading layer axis, as a scan over layers takes it."""
    if isinstance(params["layers"], dict):
        return params
    layers = params["layers"]
    return {**params, "layers": {name: _joined([layer[name] for layer in layers]) for name in layers[0]}}


def unstacked(params: Params) -> Params:
    """The inverse of `stacked`, which takes the arrays of `params["layers"]` out one by one, so that they are not held twice."""
    joined, names = params["layers"], list(params["layers"])
    apart = {name: _apart(joined.pop(name)) for name in names}
    count = len(apart[names[0]])
    return {**params, "layers": [{name: apart[name][i] for name in names} for i in range(count)]}


def one_by_one(program: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled program, waited for."""

    @functools.wraps(program)
    def run(*arguments: Any) -> Any:
        return jax.block_until_ready(program(*arguments))

    return run


@functools.partial(jax.jit, donate_argnums=0)
def _add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


@jax.jit
def _squares(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(jnp.square(array.astype(jnp.float32))) for array in arrays]


@jax.jit
def _root(sums: Sequence[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(sums))


@one_by_one
@jax.jit
def _joined(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(arrays)


@one_by_one
@jax.jit
def _apart(array: jax.Array) -> list[jax.Array]:
    return [array[i] for i in range(array.shape[0])]
