"""What the engine compiles: prefill over pages, decode over slots, draws from its logits, and the copy of pages into slots.

Two stores are kept per layer. Pages hold keys and values of every known token, one token a page. The decode cache holds the rows
that decode, one slot a row, laid out for the products of a decode step (`slots` says why). Both are donated from step to step and
updated in place. Layers are unrolled, because carrying a store through a scan would copy it. A draw is a program of its own, so that
what it is asked for never compiles the layers again.

Axes: B rows, T tokens, W width of a page table or slot, K key/value heads, N heads, D head size, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from upweight.inference.attention import Attention, KeysValues, attention_for
from upweight.models.config import DecoderConfig
from upweight.models.decoder import within_window
from upweight.models.layers import (
    Params,
    decoder_layer,
    embed,
    final_norm,
    head_matrix,
    layer_angles,
    logits_of,
    rope_angles,
)
from upweight.ops.logprobs import target_logprobs
from upweight.ops.sampling import draw

Pages = list[tuple[jax.Array, jax.Array]]
"""Per layer keys and values, each [pages, K·D]."""

Cache = list[KeysValues]
"""Per layer keys and values of the rows that decode, one slot a row, as `attention` lays them out."""


def token_bytes(config: DecoderConfig, params: Params) -> int:
    """Bytes of keys and values of one token."""
    return config.num_layers * 2 * config.kv_size * int(params["embed"].dtype.itemsize)


def empty_pages(config: DecoderConfig, params: Params, num_pages: int) -> Pages:
    shape, dtype = (num_pages, config.kv_size), params["embed"].dtype
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]


def run_over_pages(
    config: DecoderConfig,
    attention: Attention,
    params: Params,
    pages: Pages,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    table_BW: jax.Array,
    write_BT: jax.Array,
) -> tuple[Pages, jax.Array]:
    """Runs tokens through the decoder over the pages of their rows → (pages with their keys and values, hidden [B,T,H]).

    `table_BW[b, s]` is the page of the row's token s, `write_BT` the page each new token goes to. All rows are written before
    any is read, layer by layer, so rows of one call may share pages that the call itself computes.
    """
    rows, length = tokens_BT.shape
    width = table_BW.shape[1]
    past = _past(positions_BT, width)
    kept: Pages = []

    def attend_layer(index: int) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        allowed = _near(past, positions_BT, config.windows[index] if config.windows else 0)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keys, values = pages[index]
            keys = keys.at[write_BT].set(k.reshape(rows, length, config.kv_size))
            values = values.at[write_BT].set(v.reshape(rows, length, config.kv_size))
            kept.append((keys, values))
            shape = (rows, width, config.num_kv_heads, config.head_dim)
            found = keys[table_BW].reshape(shape), values[table_BW].reshape(shape)
            return attention.over_pages(q, *found, allowed)

        return attend

    return kept, _through_layers(config, params, tokens_BT, positions_BT, attend_layer)


def run_over_slots(
    config: DecoderConfig,
    attention: Attention,
    params: Params,
    pages: Pages,
    cache: Cache,
    tokens_B: jax.Array,
    positions_B: jax.Array,
    write_B: jax.Array,
    piece: dict[str, jax.Array] | None = None,
) -> tuple[Pages, Cache, jax.Array]:
    """One token a slot → (pages and cache with its keys and values, hidden [B,H]).

    `piece` is the prefill of one other row: T tokens with their positions and pages, and its page table [1,W], named as in
    `run_over_pages`. The weights are then read once for both; the piece's own hidden states are dropped.
    """
    rows = tokens_B.shape[0]
    tokens_N, positions_N, write_N = tokens_B, positions_B, write_B
    if piece is not None:
        names = ("tokens_BT", "positions_BT", "write_BT")
        beside = [piece[name][0] for name in names]
        tokens_N, positions_N, write_N = map(
            jnp.concatenate, zip((tokens_B, positions_B, write_B), beside, strict=True)
        )
    past = _past(positions_B[:, None], attention.width(cache[0]))
    kept_pages: Pages = []
    kept_cache: Cache = []

    def attend_layer(index: int) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        window = config.windows[index] if config.windows else 0

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keys, values = (
                page.at[write_N].set(new.reshape(-1, config.kv_size))
                for page, new in zip(pages[index], (k, v), strict=True)
            )
            kept_pages.append((keys, values))
            stored = attention.write(cache[index], positions_B, k[:rows, 0], v[:rows, 0])
            kept_cache.append(stored)
            allowed = _near(past, positions_B[:, None], window)
            found = attention.over_slots(q[:rows, 0], stored, allowed[:, 0])[:, None]
            if piece is None:
                return found
            table, positions = piece["table_BW"], piece["positions_BT"]
            shape = (*table.shape, config.num_kv_heads, config.head_dim)
            held = keys[table].reshape(shape), values[table].reshape(shape)
            allowed = _near(_past(positions, table.shape[1]), positions, window)
            return jnp.concatenate([found, attention.over_pages(q[rows:, 0][None], *held, allowed)[0][:, None]])

        return attend

    hidden = _through_layers(config, params, tokens_N[:, None], positions_N[:, None], attend_layer)
    return kept_pages, kept_cache, hidden[:rows, 0]


def _past(positions_BT: jax.Array, width: int) -> jax.Array:
    """[B,T,W] True where a key of the row is not after the query."""
    return jnp.arange(width) <= positions_BT[:, :, None]


def _near(past_BTW: jax.Array, positions_BT: jax.Array, window: int) -> jax.Array:
    """The same within the window of a layer; 0 = all of it."""
    if not window:
        return past_BTW
    key_positions = jnp.broadcast_to(jnp.arange(past_BTW.shape[2]), (past_BTW.shape[0], past_BTW.shape[2]))
    return within_window(past_BTW, positions_BT, key_positions, window)


def _through_layers(
    config: DecoderConfig,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    attend_layer: Callable[[int], Callable[[jax.Array, jax.Array, jax.Array], jax.Array]],
) -> jax.Array:
    """[B,T,H] after the last norm."""
    angles = rope_angles(config, positions_BT)
    x = embed(config, params, tokens_BT)
    for index, layer in enumerate(params["layers"]):
        window = config.windows[index] if config.windows else 0
        x = decoder_layer(config, layer, x, layer_angles(config, angles, window), attend_layer(index))
    return final_norm(config, params, x)


def load_all(config: DecoderConfig, attention: Attention, pages: Pages, table_BW: jax.Array) -> Cache:
    """A cache that holds the tokens of every row of the table."""
    shape = (*table_BW.shape, config.num_kv_heads, config.head_dim)
    return [
        attention.to_slots(keys[table_BW].reshape(shape), values[table_BW].reshape(shape)) for keys, values in pages
    ]


def load_some(
    config: DecoderConfig, attention: Attention, cache: Cache, pages: Pages, slots_R: jax.Array, table_RW: jax.Array
) -> Cache:
    """The cache with some slots loaded; a slot number beyond the last is ignored."""
    loaded = load_all(config, attention, pages, table_RW)
    return [
        (keys.at[slots_R].set(new_keys, mode="drop"), values.at[slots_R].set(new_values, mode="drop"))
        for (keys, values), (new_keys, new_values) in zip(cache, loaded, strict=True)
    ]


class Programs:
    """The compiled steps of one decoder; each distinct shape is one program."""

    def __init__(self, config: DecoderConfig, attention: Attention | None = None) -> None:
        how = attention or attention_for(config)

        def prefill(params: Params, pages: Pages, inputs: dict[str, jax.Array]) -> Pages:
            return run_over_pages(config, how, params, pages, **inputs)[0]

        def prefill_scored(
            params: Params,
            pages: Pages,
            inputs: dict[str, jax.Array],
            next_BT: jax.Array,
            temperature_B: jax.Array,
        ) -> tuple[Pages, jax.Array]:
            """With the log-prob of each token's successor, float32 [B,T]."""
            pages, hidden = run_over_pages(config, how, params, pages, **inputs)
            flat = hidden.reshape(-1, hidden.shape[-1])
            temperature = jnp.repeat(temperature_B, next_BT.shape[1])
            logprobs, _ = target_logprobs(
                flat, head_matrix(params), next_BT.reshape(-1), temperature, cap=config.final_softcap
            )
            return pages, logprobs.reshape(next_BT.shape)

        def forward(
            params: Params,
            pages: Pages,
            cache: Cache,
            inputs: dict[str, jax.Array],
            piece: dict[str, jax.Array] | None = None,
        ) -> tuple[Pages, Cache, jax.Array]:
            pages, cache, hidden = run_over_slots(config, how, params, pages, cache, **inputs, piece=piece)
            return pages, cache, logits_of(config, params, hidden)

        def forward_from_pages(params: Params, pages: Pages, inputs: dict[str, jax.Array]) -> tuple[Pages, jax.Array]:
            pages, hidden = run_over_pages(config, how, params, pages, **inputs)
            return pages, logits_of(config, params, hidden[:, 0])

        self.prefill = jax.jit(prefill, donate_argnums=1)
        self.prefill_scored = jax.jit(prefill_scored, donate_argnums=1)
        self.forward = jax.jit(forward, donate_argnums=(1, 2))
        self.forward_from_pages = jax.jit(forward_from_pages, donate_argnums=1)
        self.draw = jax.jit(draw, static_argnames=("filtered", "alternatives"))
        self.load_all = jax.jit(lambda pages, table: load_all(config, how, pages, table))
        self.load_some = jax.jit(
            lambda cache, pages, slots, table: load_some(config, how, cache, pages, slots, table), donate_argnums=0
        )
