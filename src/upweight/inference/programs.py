"""What the engine compiles: prefill over pages, decode over slots, and the copy of pages into slots.

Two stores are kept per layer. Pages hold keys and values of every known token, one token a page. The decode cache holds the rows
that decode, one slot a row, laid out for the products of a decode step (`slots` says why). Both are donated from step to step and
updated in place. Layers are unrolled, because carrying a store through a scan would copy it.

Axes: B rows, T tokens, W width of a page table or slot, K key/value heads, N heads, D head size, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from upweight.models.config import DecoderConfig
from upweight.models.decoder import within_window
from upweight.models.layers import (
    Params,
    attend_dense,
    decoder_layer,
    embed,
    final_norm,
    head_matrix,
    layer_angles,
    logits_of,
    rope_angles,
    softcap,
)
from upweight.ops.logprobs import target_logprobs
from upweight.ops.sampling import Adjustments, Draw, SamplingInputs, draw

Pages = list[tuple[jax.Array, jax.Array]]
"""Per layer keys and values, each [pages, K·D]."""

Cache = list[tuple[jax.Array, jax.Array]]
"""Per layer keys [B,K,D,W] and values [B,K,W,D]: on a CPU their products then run without a transposed copy, 15 times as fast."""


def token_bytes(config: DecoderConfig, params: Params) -> int:
    """Bytes of keys and values of one token."""
    return config.num_layers * 2 * config.kv_size * int(params["embed"].dtype.itemsize)


def empty_pages(config: DecoderConfig, params: Params, num_pages: int) -> Pages:
    shape, dtype = (num_pages, config.kv_size), params["embed"].dtype
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]


def run_over_pages(
    config: DecoderConfig,
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
    key_positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    past = key_positions[:, None, :] <= positions_BT[:, :, None]
    kept: Pages = []

    def attend_layer(index: int) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        window = config.windows[index] if config.windows else 0
        allowed = within_window(past, positions_BT, key_positions, window) if window else past

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keys, values = pages[index]
            keys = keys.at[write_BT].set(k.reshape(rows, length, config.kv_size))
            values = values.at[write_BT].set(v.reshape(rows, length, config.kv_size))
            kept.append((keys, values))
            shape = (rows, width, config.num_kv_heads, config.head_dim)
            found = keys[table_BW].reshape(shape), values[table_BW].reshape(shape)
            return attend_dense(q, *found, allowed, config.attn_softcap)

        return attend

    return kept, _through_layers(config, params, tokens_BT, positions_BT, attend_layer)


def run_over_slots(
    config: DecoderConfig,
    params: Params,
    pages: Pages,
    cache: Cache,
    tokens_B: jax.Array,
    positions_B: jax.Array,
    write_B: jax.Array,
) -> tuple[Pages, Cache, jax.Array]:
    """One token a slot → (pages and cache with its keys and values, hidden [B,H])."""
    rows = tokens_B.shape[0]
    width = cache[0][1].shape[2]
    slot = jnp.arange(rows)
    key_positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    positions_BT = positions_B[:, None]
    past = key_positions[:, None, :] <= positions_BT[:, :, None]
    kept_pages: Pages = []
    kept_cache: Cache = []

    def attend_layer(index: int) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        window = config.windows[index] if config.windows else 0
        allowed = within_window(past, positions_BT, key_positions, window) if window else past

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            page_keys, page_values = pages[index]
            kept_pages.append(
                (
                    page_keys.at[write_B].set(k.reshape(rows, config.kv_size)),
                    page_values.at[write_B].set(v.reshape(rows, config.kv_size)),
                )
            )
            keys, values = cache[index]
            keys = keys.at[slot, :, :, positions_B].set(k[:, 0])
            values = values.at[slot, :, positions_B, :].set(v[:, 0])
            kept_cache.append((keys, values))
            return attend_slots(q[:, 0], keys, values, allowed[:, 0], config.attn_softcap)[:, None]

        return attend

    hidden = _through_layers(config, params, tokens_B[:, None], positions_BT, attend_layer)
    return kept_pages, kept_cache, hidden[:, 0]


def attend_slots(
    q: jax.Array, keys: jax.Array, values: jax.Array, allowed_BW: jax.Array, cap: float = 0.0
) -> jax.Array:
    """Softmax attention of one query a slot; q [B,N,D], keys [B,K,D,W], values [B,K,W,D] → [B,N,D]. Softmax in float32."""
    rows, heads, size = q.shape
    kv_heads = keys.shape[1]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("bkgd,bkdw->bkgw", grouped, keys, preferred_element_type=jnp.float32) * size**-0.5
    scores = jnp.where(allowed_BW[:, None, None, :], softcap(scores, cap), -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkgw,bkwd->bkgd", weights, values).reshape(rows, heads, size)


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


def load_all(config: DecoderConfig, pages: Pages, table_BW: jax.Array) -> Cache:
    """A cache that holds the tokens of every row of the table."""
    return [_slots_of(config, keys, values, table_BW) for keys, values in pages]


def load_some(config: DecoderConfig, cache: Cache, pages: Pages, slots_R: jax.Array, table_RW: jax.Array) -> Cache:
    """The cache with some slots loaded; a slot number beyond the last is ignored."""
    loaded = load_all(config, pages, table_RW)
    return [
        (keys.at[slots_R].set(new_keys, mode="drop"), values.at[slots_R].set(new_values, mode="drop"))
        for (keys, values), (new_keys, new_values) in zip(cache, loaded, strict=True)
    ]


def _slots_of(
    config: DecoderConfig, keys: jax.Array, values: jax.Array, table_RW: jax.Array
) -> tuple[jax.Array, jax.Array]:
    shape = (*table_RW.shape, config.num_kv_heads, config.head_dim)
    return keys[table_RW].reshape(shape).transpose(0, 2, 3, 1), values[table_RW].reshape(shape).transpose(0, 2, 1, 3)


class Programs:
    """The compiled steps of one decoder; each distinct shape is one program."""

    def __init__(self, config: DecoderConfig) -> None:
        def prefill(params: Params, pages: Pages, inputs: dict[str, jax.Array]) -> Pages:
            return run_over_pages(config, params, pages, **inputs)[0]

        def prefill_scored(
            params: Params,
            pages: Pages,
            inputs: dict[str, jax.Array],
            next_BT: jax.Array,
            temperature_B: jax.Array,
        ) -> tuple[Pages, jax.Array]:
            """With the log-prob of each token's successor, float32 [B,T]."""
            pages, hidden = run_over_pages(config, params, pages, **inputs)
            flat = hidden.reshape(-1, hidden.shape[-1])
            temperature = jnp.repeat(temperature_B, next_BT.shape[1])
            logprobs, _ = target_logprobs(
                flat, head_matrix(params), next_BT.reshape(-1), temperature, cap=config.final_softcap
            )
            return pages, logprobs.reshape(next_BT.shape)

        def decode(
            params: Params,
            pages: Pages,
            cache: Cache,
            inputs: dict[str, jax.Array],
            sampling: SamplingInputs,
            adjustments: Adjustments | None,
            filtered: bool,
            alternatives: bool,
        ) -> tuple[Pages, Cache, Draw]:
            pages, cache, hidden = run_over_slots(config, params, pages, cache, **inputs)
            drawn = draw(
                logits_of(config, params, hidden), sampling, adjustments, filtered=filtered, alternatives=alternatives
            )
            return pages, cache, drawn

        def decode_from_pages(
            params: Params,
            pages: Pages,
            inputs: dict[str, jax.Array],
            sampling: SamplingInputs,
            adjustments: Adjustments | None,
            filtered: bool,
            alternatives: bool,
        ) -> tuple[Pages, Draw]:
            pages, hidden = run_over_pages(config, params, pages, **inputs)
            drawn = draw(
                logits_of(config, params, hidden[:, 0]),
                sampling,
                adjustments,
                filtered=filtered,
                alternatives=alternatives,
            )
            return pages, drawn

        self.prefill = jax.jit(prefill, donate_argnums=1)
        self.prefill_scored = jax.jit(prefill_scored, donate_argnums=1)
        self.decode = jax.jit(decode, donate_argnums=(1, 2), static_argnums=(6, 7))
        self.decode_from_pages = jax.jit(decode_from_pages, donate_argnums=1, static_argnums=(5, 6))
        self.load_all = jax.jit(lambda pages, table: load_all(config, pages, table))
        self.load_some = jax.jit(
            lambda cache, pages, slots, table: load_some(config, cache, pages, slots, table), donate_argnums=0
        )
