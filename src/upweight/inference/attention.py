"""Attention of the engine's two compiled steps, in the form that the back end is fast at.

`Products` lays the decode cache out for plain matrix products: on a CPU they then run without a transposed copy, 15 times as fast as
over [B,W,K,D]. `Fused` keeps [B,W,K,D] for `jax.nn.dot_product_attention`, which accelerators run as one kernel. Both give the same
numbers up to rounding; scores and softmax are float32.

Axes: B rows or slots, T queries, W width of a page table or slot, N heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from upweight.models.config import DecoderConfig
from upweight.models.layers import attend_dense, softcap

KeysValues = tuple[jax.Array, jax.Array]
"""Keys and values of one layer, in a layout of the decode cache."""


class Attention(Protocol):
    def to_slots(self, keys: jax.Array, values: jax.Array) -> KeysValues:
        """[B,W,K,D] each → the layout of the cache, slots first."""

    def width(self, stored: KeysValues) -> int:
        """W of a cache."""

    def write(self, stored: KeysValues, positions_B: jax.Array, k: jax.Array, v: jax.Array) -> KeysValues:
        """The cache with one token a slot put at its position; k and v [B,K,D]."""

    def over_slots(self, q: jax.Array, stored: KeysValues, allowed_BW: jax.Array) -> jax.Array:
        """One query a slot; q [B,N,D] → [B,N,D]."""

    def over_pages(self, q: jax.Array, keys: jax.Array, values: jax.Array, allowed_BTW: jax.Array) -> jax.Array:
        """q [B,T,N,D], keys and values [B,W,K,D] → [B,T,N,D]."""


def attention_for(config: DecoderConfig, backend: str | None = None) -> Attention:
    """`backend` is a JAX platform, by default the one in use. Soft caps have no fused kernel."""
    fused = (backend or jax.default_backend()) != "cpu" and not config.attn_softcap
    return Fused() if fused else Products(config.attn_softcap)


class Products:
    """Keys [B,K,D,W], values [B,K,W,D]."""

    def __init__(self, cap: float = 0.0) -> None:
        self._cap = cap

    def to_slots(self, keys: jax.Array, values: jax.Array) -> KeysValues:
        return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)

    def width(self, stored: KeysValues) -> int:
        return stored[1].shape[2]

    def write(self, stored: KeysValues, positions_B: jax.Array, k: jax.Array, v: jax.Array) -> KeysValues:
        keys, values = stored
        slot = jnp.arange(len(positions_B))
        return keys.at[slot, :, :, positions_B].set(k), values.at[slot, :, positions_B, :].set(v)

    def over_slots(self, q: jax.Array, stored: KeysValues, allowed_BW: jax.Array) -> jax.Array:
        keys, values = stored
        rows, heads, size = q.shape
        grouped = q.reshape(rows, keys.shape[1], -1, size)
        scores = jnp.einsum("bkgd,bkdw->bkgw", grouped, keys, preferred_element_type=jnp.float32) * size**-0.5
        scores = jnp.where(allowed_BW[:, None, None, :], softcap(scores, self._cap), -1e30)
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        return jnp.einsum("bkgw,bkwd->bkgd", weights, values).reshape(rows, heads, size)

    def over_pages(self, q: jax.Array, keys: jax.Array, values: jax.Array, allowed_BTW: jax.Array) -> jax.Array:
        return attend_dense(q, keys, values, allowed_BTW, self._cap)


class Fused:
    """Keys and values [B,W,K,D]."""

    def to_slots(self, keys: jax.Array, values: jax.Array) -> KeysValues:
        return keys, values

    def width(self, stored: KeysValues) -> int:
        return stored[0].shape[1]

    def write(self, stored: KeysValues, positions_B: jax.Array, k: jax.Array, v: jax.Array) -> KeysValues:
        slot = jnp.arange(len(positions_B))
        keys, values = (old.at[slot, positions_B].set(new) for old, new in zip(stored, (k, v), strict=True))
        return keys, values

    def over_slots(self, q: jax.Array, stored: KeysValues, allowed_BW: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q[:, None], *stored, mask=allowed_BW[:, None, None, :])[:, 0]

    def over_pages(self, q: jax.Array, keys: jax.Array, values: jax.Array, allowed_BTW: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, keys, values, mask=allowed_BTW[:, None])
