"""Logits and values in whatever a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from upweight.errors import BatchError, BatchTypeError


def extract_logits_from_output(output: Any) -> jax.Array:
    """An array, the first item of a tuple or list (recursively), `["logits"]` of a mapping, or `.logits`.

    `BatchTypeError` (a TypeError) for anything else.
    """
    found = output
    while not _is_array(found):
        if isinstance(found, tuple | list) and found:
            found = found[0]
        elif isinstance(found, Mapping) and "logits" in found:
            found = found["logits"]
        elif not isinstance(found, Mapping) and hasattr(found, "logits"):
            found = found.logits
        else:
            raise BatchTypeError(
                f"the model returned {describe(output)}; logits are an array, item 0, 'logits' or .logits"
            )
    return _array(found)


def extract_values_from_output(output: Any, shape: tuple[int, int] | None = None) -> jax.Array:
    """`["values"]` or `["value"]` of a mapping, `.values`, `.value`, a Variable, or item 1 of a tuple or list.

    Item 1 must be a floating array of a value's shape: (B,S), (B,S,1) or (B,S−1) for the `shape` (B,S) of the tokens, which is
    taken from the logits when not given; a cache of keys is none. `BatchTypeError` (a TypeError) otherwise.
    """
    found = _candidate(output)
    if found is None:
        raise BatchTypeError(
            f"the model returned {describe(output)}; values are 'values', .values or item 1 of a tuple"
        )
    if isinstance(output, tuple | list):
        if shape is None:
            shape = tuple(extract_logits_from_output(output).shape[:2])  # type: ignore[assignment]
        if not _is_array(found) or not _value_shaped(found, shape):
            raise BatchTypeError(
                f"the model returned {describe(output)}; item 1 is no floating array of a value's shape"
            )
    return _array(found)


def align_values(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """float32 (B,S−1): (B,S,1) is squeezed, and of (B,S) the last value, which predicts no action, is left out."""
    rows, length = shape
    if values.shape == (rows, length, 1) or values.shape == (rows, length - 1, 1):
        values = values[..., 0]
    if values.shape == (rows, length):
        values = values[:, :-1]
    if values.shape != (rows, length - 1):
        raise BatchError(f"values has shape {tuple(values.shape)}, it must be {(rows, length)} or {(rows, length - 1)}")
    return values.astype(jnp.float32)


def describe(output: Any) -> str:
    """What an output holds, one level deep."""
    if _is_array(output):
        return f"an array {tuple(output.shape)} {output.dtype}"
    if isinstance(output, Mapping):
        return "a mapping with " + (
            ", ".join(f"{key!r}: {_short(value)}" for key, value in output.items()) or "nothing"
        )
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of " + (", ".join(_short(item) for item in output) or "nothing")
    fields = ", ".join(name for name in getattr(output, "__dict__", {}) if not name.startswith("_"))
    return f"a {type(output).__name__}" + (f" with {fields}" if fields else "")


def _candidate(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output["values"] if "values" in output else output.get("value")
    if isinstance(output, nnx.Variable):
        return output
    if isinstance(output, tuple | list):
        named = next(
            (getattr(output, name) for name in ("values", "value") if _is_array(getattr(output, name, None))), None
        )
        return named if named is not None else output[1] if len(output) > 1 else None
    return next((getattr(output, name) for name in ("values", "value") if _is_array(getattr(output, name, None))), None)


def _value_shaped(x: Any, shape: tuple[int, int] | None) -> bool:
    if shape is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return False
    rows, length = shape
    return tuple(x.shape) in ((rows, length), (rows, length, 1), (rows, length - 1), (rows, length - 1, 1))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | nnx.Variable)


def _array(x: Any) -> jax.Array:
    return jnp.asarray(x[...] if isinstance(x, nnx.Variable) else x)


def _short(x: Any) -> str:
    return f"array {tuple(x.shape)} {x.dtype}" if _is_array(x) else type(x).__name__
