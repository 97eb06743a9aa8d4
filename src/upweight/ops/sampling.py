"""Logits → one token a row, with the log-prob of the distribution it was drawn from and the raw one.

Order per row: barred ids → temperature → top-k → top-p → frequency penalty → softmax → draw. Rows are independent: a row's draw depends on its own logits, its
own seed and its own count of tokens alone. Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

PARTIAL = 128  # largest logits that filters look at first; rows that need more fall back to an exact search


class SamplingInputs(NamedTuple):
    """Settings of each row of a decode step."""

    temperature: jax.Array  # float32 [B]; 0 = greedy
    top_k: jax.Array  # int32 [B]; 0 = off
    top_p: jax.Array  # float32 [B]; 1 = off
    seed: jax.Array  # uint32 [B,2]
    drawn: jax.Array  # int32 [B], tokens that the row has drawn before


class Adjustments(NamedTuple):
    """What some rows of a decode step ask for beyond temperature and filters; ids are −1 where there is none."""

    penalty: jax.Array  # float32 [B], subtracted once per occurrence of a token in `recent`
    recent: jax.Array  # int32 [B,W], the last tokens of prompt and output
    barred: jax.Array  # int32 [B,E], tokens that must not be drawn


class Draw(NamedTuple):
    token: jax.Array  # int32 [B]
    logprob: jax.Array  # float32 [B], under the distribution drawn from; the raw value for a greedy row
    raw_logprob: jax.Array  # float32 [B], log_softmax of the untouched logits


def draw(
    logits_BV: jax.Array, inputs: SamplingInputs, adjustments: Adjustments | None = None, *, filtered: bool
) -> Draw:
    """`filtered` False and `adjustments` None leave those steps out for the whole batch: cheaper programs for the usual case."""
    logits = logits_BV.astype(jnp.float32)
    greedy = inputs.temperature <= 0
    allowed = logits if adjustments is None else _at_ids(logits, adjustments.barred, -jnp.inf)
    scaled = allowed / jnp.where(greedy, 1.0, inputs.temperature)[:, None]
    if filtered:
        scaled = apply_filters(scaled, inputs.top_k, inputs.top_p)
    best = allowed
    if adjustments is not None:
        scaled = _at_ids(scaled, adjustments.recent, -adjustments.penalty[:, None])
        best = _at_ids(allowed, adjustments.recent, -adjustments.penalty[:, None])
    total = jax.nn.logsumexp(scaled, axis=-1)
    sampled = _race(scaled, _row_keys(inputs))
    token = jnp.where(greedy, jnp.argmax(best, axis=-1), sampled).astype(jnp.int32)
    raw = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0] - total
    return Draw(token, jnp.where(greedy, raw, own), raw)


def _at_ids(x_BV: jax.Array, ids_BE: jax.Array, change: jax.Array | float) -> jax.Array:
    """x plus `change` at each listed id, once per time it is listed; negative ids are no ids."""
    rows, vocab = x_BV.shape
    places = jnp.where(ids_BE >= 0, ids_BE, vocab)  # out of range: dropped
    return x_BV.at[jnp.arange(rows)[:, None], places].add(change, mode="drop")


def apply_filters(scaled_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Logits with −inf outside the kept set.

    top-k keeps values ≥ the k-th largest; top-p then keeps the smallest set of largest probabilities whose sum reaches p,
    the token that crosses included. Values equal to a border are kept.
    """
    vocab = scaled_BV.shape[-1]
    best = jax.lax.top_k(scaled_BV, min(PARTIAL, vocab))[0]
    scaled = jnp.where(scaled_BV >= _k_border(scaled_BV, best, top_k_B)[:, None], scaled_BV, -jnp.inf)
    return jnp.where(scaled >= _p_border(scaled, best, top_p_B)[:, None], scaled, -jnp.inf)


def _k_border(scaled: jax.Array, best: jax.Array, top_k: jax.Array) -> jax.Array:
    vocab, seen = scaled.shape[-1], best.shape[-1]
    off = (top_k <= 0) | (top_k >= vocab)
    near = jnp.take_along_axis(best, jnp.clip(top_k - 1, 0, seen - 1)[:, None], axis=-1)[:, 0]
    far = ~off & (top_k > seen)

    def enough(border: jax.Array) -> jax.Array:
        return jnp.sum(scaled >= border[:, None], axis=-1) >= top_k

    exact = jax.lax.cond(jnp.any(far), lambda: _largest_border(scaled, enough), lambda: near)
    return jnp.where(off, -jnp.inf, jnp.where(far, exact, near))


def _p_border(scaled: jax.Array, best: jax.Array, top_p: jax.Array) -> jax.Array:
    total = jax.nn.logsumexp(scaled, axis=-1)
    kept = best >= jnp.min(jnp.where(jnp.isfinite(scaled), scaled, jnp.inf), axis=-1)[:, None]
    mass = jnp.cumsum(jnp.where(kept, jnp.exp(best - total[:, None]), 0.0), axis=-1)
    reached = mass >= top_p[:, None]
    near = jnp.take_along_axis(best, jnp.argmax(reached, axis=-1)[:, None], axis=-1)[:, 0]
    off = top_p >= 1
    far = ~off & ~jnp.any(reached, axis=-1)

    def enough(border: jax.Array) -> jax.Array:
        above = jnp.where(scaled >= border[:, None], jnp.exp(scaled - total[:, None]), 0.0)
        return jnp.sum(above, axis=-1) >= top_p

    exact = jax.lax.cond(jnp.any(far), lambda: _largest_border(scaled, enough), lambda: near)
    return jnp.where(off, -jnp.inf, jnp.where(far, exact, near))


def _largest_border(values: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Per row the largest float at which `enough` still holds: a bisection over the ordered bit patterns of floats."""

    def as_float(order: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jnp.where(order >= 0, order, order ^ 0x7FFFFFFF), jnp.float32)

    infinity = 0x7F800000
    low = jnp.full(values.shape[0], -infinity - 1, jnp.int32)  # −inf: everything is kept
    high = jnp.full(values.shape[0], infinity, jnp.int32)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        good = enough(as_float(middle))
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return as_float(low)


def _row_keys(inputs: SamplingInputs) -> jax.Array:
    """uint32 [B,2], one pair for each row's seed and count."""

    def one(seed: jax.Array, count: jax.Array) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(seed), count))

    return jax.vmap(one)(inputs.seed, inputs.drawn)


def _race(scaled_BV: jax.Array, keys_B2: jax.Array) -> jax.Array:
    """argmax p/E with an exponential variate E per token: a draw from softmax(scaled), as by Gumbel noise.

    Unlike a search in cumulative probabilities it keeps its outcome under rounding noise: another token wins only if it was
    within that noise of the winner. A token of probability 0 never wins.
    """
    p = jnp.exp(scaled_BV - jnp.max(scaled_BV, axis=-1, keepdims=True))
    return jnp.argmax(p / _exponentials(keys_B2, scaled_BV.shape[-1]), axis=-1)


def _exponentials(keys_B2: jax.Array, vocab: int) -> jax.Array:
    """Independent exponential variates [B,V], > 0, with full relative precision near 0, where the race is decided.

    The bits are a hash of key and token (two finalisers of Wellons' lowbias32): a tenth of the time of a counter-based
    generator over the whole vocabulary.
    """
    token = jax.lax.iota(jnp.uint32, vocab)[None, :]
    bits = _mix(_mix(token + keys_B2[:, :1]) ^ keys_B2[:, 1:])
    return -jnp.log1p(-((bits | 1).astype(jnp.float32) * jnp.float32(2.0**-32)))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
