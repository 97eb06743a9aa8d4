"""Checks that the batches share. Every message begins with the field it is about."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np

from upweight.errors import BatchError, BatchTypeError

Array: TypeAlias = Any  # a jax.Array, or what `as_array` makes one of
PyTree: TypeAlias = Any


def as_array(name: str, value: Array | None) -> Any:
    """Lists and numpy arrays become JAX arrays; JAX arrays, tracers and None stay what they are.

    `BatchTypeError` for what holds no numbers.
    """
    if value is None or isinstance(value, jax.Array):
        return value
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.ndarray | np.generic):
        return value  # jax.ShapeDtypeStruct and the like
    try:
        return jax.device_put(np.asarray(value))  # jnp.asarray would compile a copy for each new shape
    except (TypeError, ValueError) as error:
        raise BatchTypeError(f"{name} is a {type(value).__name__} that holds no array of numbers: {error}") from error


def check_rows(name: str, array: Array | None, rows: int) -> None:
    """`BatchError` unless the leading dimension is `rows`."""
    if array is not None and (not array.shape or array.shape[0] != rows):
        raise BatchError(f"{name} has shape {tuple(array.shape)}, its leading dimension must be the batch size {rows}")


def check_shape(name: str, array: Array | None, shape: tuple[int, ...], meaning: str) -> None:
    """`BatchError` unless the array is None or of exactly this shape; `meaning` says what the shape is in words."""
    if array is not None and tuple(array.shape) != shape:
        raise BatchError(f"{name} has shape {tuple(array.shape)}, it must be {shape}, {meaning}")


def check_tree(name: str, tree: PyTree, rows: int) -> None:
    """All leaves are arrays with `rows` rows: `BatchTypeError` or `BatchError` otherwise."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        where = name + jax.tree_util.keystr(path)
        if not hasattr(leaf, "shape"):
            raise BatchTypeError(f"{where} is a {type(leaf).__name__}, every leaf must be an array with a shape")
        check_rows(where, leaf, rows)


def check_positive(name: str, value: int) -> None:
    """`BatchError` unless a whole number of at least 1, of Python or numpy."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise BatchError(f"{name} is {value!r}, it must be a whole number")
    if value <= 0:
        raise BatchError(f"{name} is {value}, it must be positive")


def check_mask(name: str, mask: Array | None) -> None:
    """`BatchError` for NaN in a mask that is on the host, where a look at it costs nothing."""
    on_host = mask is not None and not isinstance(mask, jax.Array)
    if on_host and np.issubdtype((given := np.asarray(mask)).dtype, np.floating) and np.isnan(given).any():
        raise BatchError(f"{name} holds NaN; a mask holds 1 where something counts and 0 elsewhere")


def check_any_rows(name: str, array: Array) -> None:
    """`BatchError` for a batch of nothing."""
    if array.shape[0] == 0:
        raise BatchError(f"{name} has shape {tuple(array.shape)}; a step needs at least one row")
