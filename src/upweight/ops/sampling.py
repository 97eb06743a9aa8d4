"""Logits → one token a row, with its log-probs: of the distribution drawn from, of the whole one at its temperature, and raw.

Order per row: logit bias and allowed tokens → repetition penalty → temperature → top-k → top-p → min-p → frequency and presence
penalty → softmax → draw. Rows are independent: a row's draw depends on its own logits, its own seed and its own count of tokens
alone. Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

PARTIAL = 128  # largest logits that top-k looks at first; rows that need more fall back to an exact search
MOST_ALTERNATIVES = 20


class SamplingInputs(NamedTuple):
    """Settings of each row of a decode step."""

    temperature: jax.Array  # float32 [B]; 0 = greedy
    top_k: jax.Array  # int32 [B]; 0 = off
    top_p: jax.Array  # float32 [B]; 1 = off
    min_p: jax.Array  # float32 [B]; 0 = off
    seed: jax.Array  # uint32 [B,2]
    drawn: jax.Array  # int32 [B], tokens that the row has drawn before
    alternatives: jax.Array  # bool [B], whether its likeliest tokens are wanted


class Adjustments(NamedTuple):
    """What some rows of a decode step ask for beyond temperature and filters; ids are −1 where there is none."""

    bias_ids: jax.Array  # int32 [B,E]
    bias: jax.Array  # float32 [B,E], added to the logits of `bias_ids`; −inf bars a token
    recent_ids: jax.Array  # int32 [B,W], distinct tokens among the last ones of prompt and output
    counts: jax.Array  # float32 [B,W], how often each occurs there
    repetition: jax.Array  # float32 [B], divides positive and multiplies negative logits of recent tokens; 1 = off
    frequency: jax.Array  # float32 [B], subtracted once per occurrence
    presence: jax.Array  # float32 [B], subtracted once
    allowed: jax.Array | None = None  # uint8 [B,⌈V/8⌉], bit i%8 of byte i//8 set where token i may be drawn


class Draw(NamedTuple):
    token: jax.Array  # int32 [B]
    logprob: jax.Array  # float32 [B], under the distribution drawn from; the raw value for a greedy row
    raw_logprob: jax.Array  # float32 [B], log_softmax of the untouched logits
    tempered_logprob: (
        jax.Array
    )  # float32 [B], log_softmax of the logits over the temperature; the raw value for a greedy row
    best_ids: jax.Array | None = None  # int32 [B,20], the likeliest tokens, if asked for
    best_logprobs: jax.Array | None = None  # float32 [B,20], falling, of the distribution that `logprob` is of


def draw(
    logits_BV: jax.Array,
    inputs: SamplingInputs,
    adjustments: Adjustments | None = None,
    *,
    filtered: bool,
    alternatives: bool = False,
) -> Draw:
    """One token a row. `filtered` and `alternatives` False and `adjustments` None leave those steps out for the whole batch.

    With `alternatives` the likeliest tokens are found where `inputs.alternatives` wants them for any row, else they are zeros.
    """
    logits = jnp.asarray(logits_BV, jnp.float32)
    greedy = inputs.temperature <= 0
    allowed = logits if adjustments is None else _before_temperature(logits, adjustments)
    scaled = allowed / jnp.where(greedy, 1.0, inputs.temperature)[:, None]
    if filtered:
        scaled = apply_filters(scaled, inputs.top_k, inputs.top_p, inputs.min_p)
    best = allowed
    if adjustments is not None:
        scaled, best = (_after_filters(x, adjustments) for x in (scaled, allowed))
    token = jax.lax.cond(
        jnp.any(greedy),
        lambda: jnp.where(greedy, _first_max(best), _race(scaled, _row_keys(inputs))),
        lambda: _race(scaled, _row_keys(inputs)),
    )
    raw_total, total = jax.nn.logsumexp(logits, axis=-1), jax.nn.logsumexp(scaled, axis=-1)
    raw = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - raw_total
    own = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0] - total
    tempered = own
    if filtered or adjustments is not None:
        whole = logits / jnp.where(greedy, 1.0, inputs.temperature)[:, None]
        tempered = jnp.take_along_axis(whole, token[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(whole, axis=-1)
    drawn = Draw(token, jnp.where(greedy, raw, own), raw, jnp.where(greedy, raw, tempered))
    if not alternatives:
        return drawn
    count = min(MOST_ALTERNATIVES, logits.shape[-1])

    def likeliest() -> tuple[jax.Array, jax.Array]:
        shown = jnp.where(greedy[:, None], logits - raw_total[:, None], scaled - total[:, None])
        values, ids = jax.lax.top_k(shown, count)
        return values, ids

    nothing = jnp.zeros((logits.shape[0], count), jnp.float32), jnp.zeros((logits.shape[0], count), jnp.int32)
    values, ids = jax.lax.cond(jnp.any(inputs.alternatives), likeliest, lambda: nothing)
    return drawn._replace(best_ids=ids, best_logprobs=values)


def _before_temperature(logits: jax.Array, given: Adjustments) -> jax.Array:
    """Bias, allowed tokens and repetition penalty (Keskar et al. 2019)."""
    rows, vocab = logits.shape
    logits = logits.at[jnp.arange(rows)[:, None], _places(given.bias_ids, vocab)].add(given.bias, mode="drop")
    if given.allowed is not None:
        bits = jnp.unpackbits(given.allowed, axis=-1, count=vocab, bitorder="little")
        logits = jnp.where(bits == 1, logits, -jnp.inf)
    recent = jnp.take_along_axis(logits, jnp.maximum(given.recent_ids, 0), axis=-1)
    factor = given.repetition[:, None]
    changed = jnp.where(recent > 0, recent / factor, recent * factor)
    return logits.at[jnp.arange(rows)[:, None], _places(given.recent_ids, vocab)].set(changed, mode="drop")


def _after_filters(x_BV: jax.Array, given: Adjustments) -> jax.Array:
    rows, vocab = x_BV.shape
    penalty = given.frequency[:, None] * given.counts + given.presence[:, None]
    return x_BV.at[jnp.arange(rows)[:, None], _places(given.recent_ids, vocab)].add(-penalty, mode="drop")


def _places(ids_BE: jax.Array, vocab: int) -> jax.Array:
    return jnp.where(ids_BE >= 0, ids_BE, vocab)  # out of range: dropped


def apply_filters(scaled_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array) -> jax.Array:
    """Logits with −inf outside the kept set.

    top-k keeps values ≥ the k-th largest; top-p then keeps the smallest set of largest probabilities whose sum reaches p, the
    token that crosses included; min-p drops what is less likely than that share of the likeliest. Values equal to a border are
    kept.
    """
    scaled = jnp.where(scaled_BV >= _k_border(scaled_BV, top_k_B)[:, None], scaled_BV, -jnp.inf)
    p = jnp.exp(scaled - jax.nn.logsumexp(scaled, axis=-1, keepdims=True))
    border = jnp.maximum(_p_border(p, top_p_B), min_p_B * jnp.max(p, axis=-1))
    return jnp.where(p >= border[:, None], scaled, -jnp.inf)


def _k_border(scaled: jax.Array, top_k: jax.Array) -> jax.Array:
    """[B] the k-th largest value; −inf where top-k is off."""
    vocab = scaled.shape[-1]
    seen = min(PARTIAL, vocab)
    off = (top_k <= 0) | (top_k >= vocab)
    far = ~off & (top_k > seen)

    def nearby() -> jax.Array:
        best = jax.lax.top_k(scaled, seen)[0]
        return jnp.take_along_axis(best, jnp.clip(top_k - 1, 0, seen - 1)[:, None], axis=-1)[:, 0]

    def enough(border: jax.Array) -> jax.Array:
        return jnp.sum(scaled >= border[:, None], axis=-1) >= top_k

    nothing = jnp.full(top_k.shape, -jnp.inf, scaled.dtype)
    near = jax.lax.cond(jnp.any(~off & ~far), nearby, lambda: nothing)
    exact = jax.lax.cond(jnp.any(far), lambda: _largest_border(scaled, enough), lambda: nothing)
    return jnp.where(off, -jnp.inf, jnp.where(far, exact, near))


def _p_border(p_BV: jax.Array, top_p: jax.Array) -> jax.Array:
    """[B] a probability such that those at least as large are the nucleus; 0 where top-p is off.

    A bisection on the ratio scale between the largest probability and (1 − top_p)/V, below which too little mass lies to matter.
    It ends when the mass between the ends is that of one token at most: no sort, and a fraction of the time of one.
    """
    goal = jnp.maximum(top_p, 1e-30)

    def mass(border: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(p_BV >= border[:, None], p_BV, 0.0), axis=-1)

    def search() -> jax.Array:
        high = jnp.max(p_BV, axis=-1)
        low = jnp.minimum(0.99 * (1 - goal) / p_BV.shape[-1], high)
        above_high = mass(high)
        low = jnp.where((above_high >= goal) | (top_p >= 1), high, low)

        def open_rows(state: _Search) -> jax.Array:
            return (state.low < state.high) & (state.above_low - state.above_high >= 1.9 * state.low)

        def halve(state: _Search) -> _Search:
            live = open_rows(state)
            middle = jnp.sqrt(state.low) * jnp.sqrt(state.high)
            adjacent = (middle <= state.low) | (middle >= state.high)  # equal values: no float lies between the ends
            above = mass(middle)
            good = above >= goal
            up, down = live & good & ~adjacent, live & ~good & ~adjacent
            return _Search(
                low=jnp.where(up, middle, state.low),
                high=jnp.where(live & adjacent, state.low, jnp.where(down, middle, state.high)),
                above_low=jnp.where(up, above, state.above_low),
                above_high=jnp.where(down, above, state.above_high),
            )

        start = _Search(low, high, jnp.ones_like(low), above_high)
        return jax.lax.while_loop(lambda state: jnp.any(open_rows(state)), halve, start).low

    border = jax.lax.cond(jnp.any(top_p < 1), search, lambda: jnp.zeros_like(goal))
    return jnp.where(top_p >= 1, 0.0, border)


class _Search(NamedTuple):
    """Per row: `low` is known to reach the goal, `high` not to; with the mass at least as large as each."""

    low: jax.Array
    high: jax.Array
    above_low: jax.Array
    above_high: jax.Array


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
    return _first_max(p / _exponentials(keys_B2, scaled_BV.shape[-1]))


def _first_max(x_BV: jax.Array) -> jax.Array:
    """int32 [B], argmax by two plain reductions, which XLA's CPU back end runs at several times the speed of its own argmax."""
    ids = jax.lax.broadcasted_iota(jnp.int32, x_BV.shape, 1)
    is_max = x_BV == jnp.max(x_BV, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_max, ids, x_BV.shape[-1] - 1), axis=-1)


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
