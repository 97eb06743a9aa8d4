"""The device side of the engine: key-value store and the two compiled steps, prefill and decode.

Shapes come from a small grid: decode runs 2, 8, … or `max_rows` rows, prefill 1, 4 or 16 rows of 16, 64 or 256 tokens, page tables
have a bucketed width. The store is donated from step to step and updated in place. Layers are unrolled, because carrying the
store through a scan would copy it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from upweight.inference.scheduler import PrefillPiece, Row
from upweight.models.config import DecoderConfig
from upweight.models.decoder import within_window
from upweight.models.layers import Params, attend_dense, decoder_layer, logits_of, rms_norm, rope_angles
from upweight.ops.packing import bucket, power_bucket
from upweight.ops.sampling import Adjustments, Draw, SamplingInputs, draw

Store = list[tuple[jax.Array, jax.Array]]
"""Per layer keys and values, each [pages, K·D]; a page holds one token."""

_PREFILL_ROWS = (1, 4, 16)
_PREFILL_TOKENS = (16, 64, 256)


class Drawn(NamedTuple):
    """What a decode step drew, one entry a row."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]


def page_bytes(config: DecoderConfig) -> int:
    """Bytes of the store that one token takes, float32."""
    return config.num_layers * 2 * config.kv_size * 4


def store_tokens(
    config: DecoderConfig,
    params: Params,
    store: Store,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    table_BW: jax.Array,
    write_BT: jax.Array,
) -> tuple[Store, jax.Array]:
    """Runs tokens through the decoder over the pages of their rows → (store with their keys and values, hidden [B,T,H]).

    `table_BW[b, s]` is the page of the row's token s, `write_BT` the page each new token goes to. All rows are written before
    any is read, layer by layer, so rows of one call may share pages that the call itself computes.
    """
    rows, length = tokens_BT.shape
    width = table_BW.shape[1]
    key_positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    past = key_positions[:, None, :] <= positions_BT[:, :, None]
    angles = rope_angles(config, positions_BT)
    x = params["embed"][tokens_BT]
    kept: Store = []
    for index, (layer, (keys, values)) in enumerate(zip(params["layers"], store, strict=True)):
        window = config.windows[index] if config.windows else 0
        allowed = within_window(past, positions_BT, key_positions, window) if window else past

        def attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            keys: jax.Array = keys,
            values: jax.Array = values,
            allowed: jax.Array = allowed,
        ) -> jax.Array:
            keys = keys.at[write_BT].set(k.reshape(rows, length, config.kv_size))
            values = values.at[write_BT].set(v.reshape(rows, length, config.kv_size))
            kept.append((keys, values))
            shape = (rows, width, config.num_kv_heads, config.head_dim)
            return attend_dense(q, keys[table_BW].reshape(shape), values[table_BW].reshape(shape), allowed)

        x = decoder_layer(config, layer, x, angles, attend)
    return kept, rms_norm(x, params["norm"], config.norm_eps)


class ModelRunner:
    """Holds the weights that requests are answered with and the key-value store."""

    def __init__(self, config: DecoderConfig, params: Params, *, num_pages: int, max_rows: int) -> None:
        self.config = config
        self.params = params
        self._store: Store = [
            (jnp.zeros((num_pages, config.kv_size), jnp.float32), jnp.zeros((num_pages, config.kv_size), jnp.float32))
            for _ in range(config.num_layers)
        ]
        self._shapes: set[tuple[object, ...]] = set()
        self._row_sizes = sorted({size for size in (2, 8) if size < max_rows} | {max(2, max_rows)})

        def prefill(params: Params, store: Store, inputs: dict[str, jax.Array]) -> Store:
            return store_tokens(config, params, store, **inputs)[0]

        def decode(
            params: Params,
            store: Store,
            inputs: dict[str, jax.Array],
            sampling: SamplingInputs,
            adjustments: Adjustments | None,
            filtered: bool,
        ) -> tuple[Store, Draw]:
            store, hidden = store_tokens(config, params, store, **inputs)
            return store, draw(logits_of(params, hidden[:, 0]), sampling, adjustments, filtered=filtered)

        self._prefill = jax.jit(prefill, donate_argnums=1)
        self._decode = jax.jit(decode, donate_argnums=1, static_argnums=5)

    @property
    def num_programs(self) -> int:
        """Distinct shapes run so far; each is one program, compiled or fetched from the cache."""
        return len(self._shapes)

    def prefill(self, pieces: Sequence[PrefillPiece]) -> None:
        """Computes keys and values of the pieces, in order; a later piece may build on an earlier one."""
        for group in _prefill_groups(pieces):
            rows = _round_up(len(group), _PREFILL_ROWS)
            length = _round_up(max(piece.count for piece in group), _PREFILL_TOKENS)
            width = bucket(max(piece.start + piece.count for piece in group), 64)
            tokens, positions, write = np.zeros((3, rows, length), np.int32)
            table = np.zeros((rows, width), np.int32)
            for b, piece in enumerate(group):
                span = slice(piece.start, piece.start + piece.count)
                tokens[b, : piece.count] = piece.row.tokens[span]
                positions[b, : piece.count] = np.arange(span.start, span.stop)
                write[b, : piece.count] = piece.row.pages[span]
                table[b, : span.stop] = piece.row.pages[: span.stop]
            inputs = {"tokens_BT": tokens, "positions_BT": positions, "table_BW": table, "write_BT": write}
            self._shapes.add(("prefill", rows, length, width))
            self._store = self._prefill(self.params, self._store, inputs)

    def decode(self, rows: Sequence[Row]) -> Drawn:
        """Computes each row's last token and draws its next one."""
        size = _round_up(len(rows), self._row_sizes)
        width = bucket(max(len(row.tokens) for row in rows), 64)
        tokens, positions, write = np.zeros((3, size, 1), np.int32)
        table = np.zeros((size, width), np.int32)
        temperature, top_p = np.ones((2, size), np.float32)
        top_k, drawn_before = np.zeros((2, size), np.int32)
        seed = np.zeros((size, 2), np.uint32)
        filtered = False
        for b, row in enumerate(rows):
            params = row.request.params
            last = len(row.tokens) - 1
            tokens[b], positions[b], write[b] = row.tokens[last], last, row.pages[last]
            table[b, : last + 1] = row.pages
            temperature[b], top_p[b] = params.temperature, params.top_p
            top_k[b] = min(params.top_k, self.config.vocab_size)
            seed[b] = row.seed >> 32, row.seed & 0xFFFFFFFF
            drawn_before[b] = row.num_output
            filtered |= params.filtered
        inputs = {"tokens_BT": tokens, "positions_BT": positions, "table_BW": table, "write_BT": write}
        sampling = SamplingInputs(temperature, top_k, top_p, seed, drawn_before)  # type: ignore[arg-type]
        adjustments = _adjustments(rows, size) if any(row.request.params.adjusted for row in rows) else None
        extra = None if adjustments is None else (adjustments.recent.shape, adjustments.barred.shape)
        self._shapes.add(("decode", size, width, filtered, extra))
        self._store, drawn = self._decode(self.params, self._store, inputs, sampling, adjustments, filtered)
        host = jax.device_get(drawn)
        used = len(rows)
        return Drawn(host.token[:used].tolist(), host.logprob[:used].tolist(), host.raw_logprob[:used].tolist())


def _adjustments(rows: Sequence[Row], size: int) -> Adjustments:
    """Penalties and barred ids of a step; −1 where a row has none."""
    recent: list[list[int]] = []
    barred: list[list[int]] = []
    for row in rows:
        params = row.request.params
        window = params.rep_window if params.frequency_penalty else 0
        recent.append(row.tokens[-window:] if window else [])
        barred.append(sorted(row.stop_ids) if row.num_output < params.min_tokens else [])
    penalty = np.zeros(size, np.float32)
    penalty[: len(rows)] = [row.request.params.frequency_penalty for row in rows]
    return Adjustments(penalty, _id_table(recent, size, 64), _id_table(barred, size, 8))  # type: ignore[arg-type]


def _id_table(lists: Sequence[Sequence[int]], size: int, least: int) -> np.ndarray:
    table = np.full((size, power_bucket(max(map(len, lists), default=1), least)), -1, np.int32)
    for b, ids in enumerate(lists):
        table[b, : len(ids)] = ids
    return table


def _round_up(n: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= n)


def _prefill_groups(pieces: Sequence[PrefillPiece]) -> list[list[PrefillPiece]]:
    """Pieces that run in one call: consecutive (order matters), split to the longest call, few enough rows.

    A row stands in a group at most once, and short pieces do not share a call with long ones: they would all be padded.
    """
    longest = _PREFILL_TOKENS[-1]
    split = [
        PrefillPiece(piece.row, piece.start + at, min(longest, piece.count - at))
        for piece in pieces
        for at in range(0, piece.count, longest)
    ]
    groups: list[list[PrefillPiece]] = []
    for piece in split:
        size = _round_up(piece.count, _PREFILL_TOKENS)
        last = groups[-1] if groups else []
        fits = last and len(last) < _PREFILL_ROWS[-1] and _round_up(last[0].count, _PREFILL_TOKENS) == size
        if fits and size < longest:
            last.append(piece)
        else:
            groups.append([piece])
    return groups
