"""A short name for the exact bits of a parameter tree, taken over the arrays where they are.

Each array is reduced on its device to two 32-bit sums of its bits, each mixed with its place; the sums of all arrays, their
paths, shapes and dtypes are then hashed. One flipped bit or one array left out always changes the name; other changes, such
as two swapped values or rows, go unseen with a chance of about 2⁻⁶⁴.
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
    """Two sums mod 2³² of words mixed with their places, the second mixed once more.

    Mixing is a bijection of the 32-bit words, so one changed word always shows in both sums; that it is not linear keeps
    changes of several words (two signs, a negated row, x and −x swapped) from cancelling.
    The leading axis is summed first: adding whole rows runs at memory speed on CPUs, reducing within rows does not.
    """
    words = jax.lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)
    places = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(array.shape):
        numbers = _mix(jax.lax.iota(jnp.uint32, size) + jnp.uint32(0x85EBCA6B + axis))
        places = places * jnp.uint32(0x9E3779B1) + numbers.reshape(-1, *(1,) * (array.ndim - axis - 1))
    mixed = _mix(words ^ places)
    return jnp.stack([_sum(mixed), _sum(_mix(mixed + jnp.uint32(0xC2B2AE35)))])


def _sum(words: jax.Array) -> jax.Array:
    for _ in words.shape:
        words = jnp.sum(words, axis=0, dtype=jnp.uint32)
    return words


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: a well-mixed bijection of uint32."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
