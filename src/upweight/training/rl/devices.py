"""Where a trainer's arrays lie on a mesh of devices, of one process or of several.

The compiled steps are those of one device; XLA splits them by where their inputs lie. Results are those of one device up to the
order of sums.

    data parallel    Placement(mesh)                            parameters on every device, rows split
    fully sharded    Placement(mesh, parameters="data")         each array split over the axis that rows are split over
    tensor sharded   Placement(mesh, parameters="model")        each array split over an axis of its own
    by own rules     Placement(mesh, parameters=rule)           rule(path, shape) → PartitionSpec
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from upweight.errors import ConfigError

Axes = str | tuple[str, ...]
Rule = Callable[[str, tuple[int, ...]], PartitionSpec]
Shardings = dict[str, NamedSharding]  # path in a module's state → where the array lies


@dataclass(frozen=True)
class Placement:
    """How a trainer uses a mesh; `trainer.place(placement)` moves it there.

    With several processes (`jax.distributed.initialize`) the mesh is over the devices of all of them, and every process calls the
    trainer with the same batch. `ConfigError` for an axis that the mesh does not have.
    """

    mesh: Mesh
    rows: Axes | None = "data"  # the axes that a batch's rows are split over; None = every device computes all rows
    parameters: Axes | Rule | None = (
        None  # the axes that parameters are split over, or a rule; None = whole on every device
    )

    def __post_init__(self) -> None:
        # XLA decides about what happens between: axes that want a sharding for every operation are not what is asked for.
        object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names))
        for name, axes in (("rows", self.rows), ("parameters", self.parameters)):
            for axis in () if callable(axes) else _each(axes):
                if axis not in self.mesh.shape:
                    have = ", ".join(map(str, self.mesh.axis_names))
                    raise ConfigError(f"Placement.{name} names the axis {axis!r}; the mesh has {have}")

    @property
    def row_parts(self) -> int:
        """How many parts a batch's rows are split into."""
        return math.prod(self.mesh.shape[axis] for axis in _each(self.rows))

    def spec(self, path: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Of a parameter: each axis splits the largest dimension that it divides and no other axis has."""
        if callable(self.parameters):
            return self.parameters(path, shape)
        found: list[str | None] = [None] * len(shape)
        for axis in _each(self.parameters):
            size = self.mesh.shape[axis]
            free = [i for i, length in enumerate(shape) if found[i] is None and length >= size and length % size == 0]
            if free:
                found[max(free, key=lambda i: shape[i])] = axis
        return PartitionSpec(*found)

    def model_shardings(self, module: Any) -> Shardings:
        return {
            path: NamedSharding(self.mesh, self.spec(path, tuple(leaf.shape)) if _is_number(leaf) else PartitionSpec())
            for path, leaf in _leaves(module)
        }

    def optimizer_shardings(self, optimizer: Any, of_model: Shardings, model: Any) -> Shardings:
        """Moments lie as their parameters do; counters are everywhere."""
        shapes = {path: tuple(leaf.shape) for path, leaf in _leaves(model)}
        whole = NamedSharding(self.mesh, PartitionSpec())

        def of(path: str, leaf: Any) -> NamedSharding:
            fits = (name for name in shapes if path.endswith(name) and shapes[name] == tuple(leaf.shape))
            return of_model[name] if (name := next(fits, None)) else whole

        return {path: of(path, leaf) for path, leaf in _leaves(optimizer)}

    def put_rows(self, tree: Any) -> Any:
        """Arrays whose leading dimension are rows, split over the devices where they can be."""
        parts = self.row_parts

        def put(x: Any) -> Any:
            even = parts > 1 and x.ndim > 0 and x.shape[0] % parts == 0
            return put_array(x, NamedSharding(self.mesh, PartitionSpec(self.rows) if even else PartitionSpec()))

        return jax.tree.map(put, tree)


def put_module(module: nnx.Pytree, shardings: Shardings) -> None:
    """Moves the arrays of a module, in place."""
    leaves, form = jax.tree_util.tree_flatten_with_path(nnx.state(module))
    placed = [put_array(leaf, shardings[jax.tree_util.keystr(path)]) for path, leaf in leaves]
    nnx.update(module, jax.tree.unflatten(form, placed))


def put_array(x: Any, sharding: NamedSharding) -> Any:
    """The array on the devices; with several processes each has the same one and keeps its part."""
    if not _is_number(x):
        data = put_array(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def constrained(state: Any, shardings: Shardings | None) -> Any:
    """The state of a module, inside a compiled step, to lie as it lay before."""
    if shardings is None:
        return state
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.lax.with_sharding_constraint(x, shardings[jax.tree_util.keystr(path)]), state
    )


def on_host(x: Any) -> np.ndarray:
    """The whole array, also when other processes hold parts of it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def _leaves(module: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(module))
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _is_number(x: Any) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _each(axes: Any) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
