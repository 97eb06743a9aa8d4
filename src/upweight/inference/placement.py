"""Where and in what precision a scheduler keeps its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from upweight.errors import ConfigError
from upweight.models.layers import Params

_DTYPES = ("float32", "bfloat16", "float16")
_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


@dataclass(frozen=True)
class Placement:
    """None leaves arrays as they are."""

    device: Any = None  # jax.Device or a sharding
    dtype: Any = None


def placement(device: Any, dtype: Any) -> Placement:
    """`device` is a `jax.Device`, a sharding or a platform ("cpu", "cuda:0", "tpu"); `dtype` a name or anything named so.

    `ConfigError` for what is not there.
    """
    return Placement(_device(device), _dtype(dtype))


def place(params: Params, where: Placement | None) -> Params:
    """The parameters there; the same arrays when they already are."""
    if where is None or where == Placement():
        return params

    def move(array: jax.Array) -> jax.Array:
        cast = array if where.dtype is None else array.astype(where.dtype)
        return cast if where.device is None else jax.device_put(cast, where.device)

    return jax.tree.map(move, params)


def _device(device: Any) -> Any:
    if device is None or isinstance(device, jax.Device | jax.sharding.Sharding):
        return device
    platform, _, index = str(device).partition(":")
    try:
        return jax.devices(_PLATFORMS.get(platform, platform))[int(index or 0)]
    except (RuntimeError, IndexError, ValueError):
        there = ", ".join(sorted({f"{d.platform}:{d.id}" for d in jax.devices()}))
        raise ConfigError(f"device = {str(device)!r} is not here; here: {there}") from None


def _dtype(dtype: Any) -> Any:
    if dtype is None:
        return None
    named = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    name = str(named).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"dtype = {name!r} is not offered; offered: {', '.join(_DTYPES)}")
    return jnp.dtype(name)
