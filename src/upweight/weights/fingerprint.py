"""A short name for the exact bits of a parameter tree, taken over the arrays where they are.

Each array is reduced on its device to two 32-bit sums of its bits, weighted by position; the sums of all arrays, their paths,
shapes and dtypes are then hashed. One flipped bit, two swapped values or one array left out change the name.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprint(params: Any) -> str:
    """32 hex digits; equal trees (paths, shapes, dtypes, bits) have equal ones."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sums = [_sums(leaf) for _, leaf in leaves]
    digest = hashlib.blake2b(digest_size=16)
    for (path, leaf), pair in zip(leaves, sums, strict=True):
        digest.update(f"{jax.tree_util.keystr(path)}{leaf.shape}{leaf.dtype}".encode())
        digest.update(np.asarray(pair).tobytes())
    return digest.hexdigest()


@jax.jit
def _sums(array: jax.Array) -> jax.Array:
    """Two forms Σ word·Π odd_axis[i] mod 2³²: a changed bit always shows, since odd factors are invertible.

    The leading axis is summed first: adding whole rows runs at memory speed on CPUs, reducing within rows does not.
    """
    words = jax.lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)
    sums = []
    for salt in (0x85EBCA6B, 0xC2B2AE35):
        total = words
        for axis, size in enumerate(array.shape):
            factors = _odd_numbers(size, salt + axis).reshape(-1, *(1,) * (total.ndim - 1))
            total = jnp.sum(total * factors, axis=0, dtype=jnp.uint32)
        sums.append(total)
    return jnp.stack(sums)


def _odd_numbers(count: int, salt: int) -> jax.Array:
    """uint32 [count] of well-mixed odd numbers (finaliser of MurmurHash3)."""
    x = jax.lax.iota(jnp.uint32, count) + jnp.uint32(salt & 0xFFFFFFFF)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)) | jnp.uint32(1)
