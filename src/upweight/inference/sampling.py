"""One draw from given logits, as a pure function of arrays. The engine draws with `ops.sampling`; the rules are the same."""

from __future__ import annotations

import math
import secrets
from typing import Any

import jax
import jax.numpy as jnp

from upweight.errors import RequestError
from upweight.ops.sampling import apply_filters


def sample(
    logits: Any,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    frequency_penalty: Any = 0.0,
    input_ids: Any = None,
    input_mask: Any = None,
    filter_value: float = -math.inf,
    return_logprobs: bool = False,
    *,
    key: jax.Array | int | None = None,
) -> Any:
    """Token ids int32 [B] drawn from `logits` [B,V] (or [V], one row); with `return_logprobs` also their float32 log-probs.

    Order: temperature → top-k → top-p → frequency penalty → softmax → draw, in float32; settings are scalars or [B]. The
    penalty is subtracted per occurrence in `input_ids` [B,N] where `input_mask` (all without one). Filters put `filter_value`
    in place of what they leave out. Temperature 0 is greedy: penalty, then argmax; its log-prob is that of the logits as
    given. The same `key` (a JAX key or an int) gives the same draw; without one a fresh one is taken. No argument is changed.
    """
    rows = jnp.atleast_2d(jnp.asarray(logits)).astype(jnp.float32)
    count, vocab = rows.shape
    heat, share = _column(temperature, count, jnp.float32), _column(top_p, count, jnp.float32)
    if bool(jnp.any(~(heat >= 0))):
        raise RequestError(f"temperature is {float(jnp.min(heat))}; it must be at least 0", field="temperature")
    if bool(jnp.any(~((share >= 0) & (share <= 1)))):
        raise RequestError(f"top_p is {share.tolist()}; it must be from 0 to 1", field="top_p")
    greedy = heat <= 0
    scaled = rows / jnp.where(greedy, 1.0, heat)[:, None]
    kept = apply_filters(scaled, jnp.minimum(_column(top_k, count, jnp.int32), vocab), share, jnp.zeros(count))
    scaled = jnp.where(jnp.isneginf(kept) & ~jnp.isneginf(scaled), filter_value, kept)
    penalty = _column(frequency_penalty, count, jnp.float32)[:, None] * _occurrences(
        input_ids, input_mask, count, vocab
    )
    drawn = jax.random.categorical(_key(key), scaled - penalty, axis=-1)
    tokens = jnp.where(greedy, jnp.argmax(rows - penalty, axis=-1), drawn).astype(jnp.int32)
    if not return_logprobs:
        return tokens
    used = jnp.where(greedy[:, None], rows, scaled - penalty)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(used, axis=-1), tokens[:, None], axis=-1)[:, 0]
    return tokens, logprobs


def _column(value: Any, count: int, dtype: Any) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(value, dtype).reshape(-1), (count,))


def _occurrences(ids: Any, mask: Any, count: int, vocab: int) -> jax.Array:
    """float32 [B,V]: how often each token stands in its row."""
    if ids is None:
        return jnp.zeros((count, vocab), jnp.float32)
    places = jnp.atleast_2d(jnp.asarray(ids))
    real = jnp.ones(places.shape, bool) if mask is None else jnp.atleast_2d(jnp.asarray(mask)).astype(bool)
    places = jnp.where(real, places, vocab)  # out of range: dropped
    return jnp.zeros((count, vocab), jnp.float32).at[jnp.arange(count)[:, None], places].add(1.0, mode="drop")


def _key(key: jax.Array | int | None) -> jax.Array:
    if isinstance(key, jax.Array):
        return key
    return jax.random.key(secrets.randbits(31) if key is None else key)
