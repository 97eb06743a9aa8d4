"""The device side of the engine: weights, key-value stores and the calls of the compiled steps.

Shapes come from a small grid: decode runs 2, 8, 16, … or `max_rows` slots, prefill 1, 2, 4 or 8 rows of 16, 64 or 256 tokens; page
tables and slots have a bucketed width. A product of one row has other last bits than one of several, so a row that may ever have
others beside it is never computed alone: only an engine for one row decodes one. On CPUs with AVX-512 two rows differ from eight and
more as well, by less than 1e-5 in a log-prob; on others 2, 8, 16 and 32 rows are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from upweight.inference.programs import Cache, Programs, empty_pages, token_bytes
from upweight.inference.scheduler import PrefillPiece, Row, beside_tokens
from upweight.inference.slots import Slots
from upweight.inference.step_inputs import adjustments, sampling_inputs
from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.ops.packing import bucket, power_bucket
from upweight.ops.sampling import Draw

PREFILL_ROWS = (1, 2, 4, 8)
PREFILL_TOKENS = (16, 64, 256)
_LOADED = 4  # slots that one call loads
_WIDTH = 64
CACHE_BYTES = 1 << 30  # beyond it decode gathers pages in every step: slower, but without a second copy of them


class Drawn(NamedTuple):
    """What a decode step drew, one entry a row."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    tempered_logprobs: list[float]
    best: list[list[tuple[int, float]]] | None = None  # likeliest tokens with their log-probs, falling


class Scored(NamedTuple):
    """Log-probs of a row's own tokens `start + 1`, `start + 2`, …"""

    row: Row
    start: int
    logprobs: list[float]


class ModelRunner:
    """Holds the weights that requests are answered with and the key-value stores."""

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        *,
        num_pages: int,
        max_rows: int,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.config = config
        self.params = params
        self.programs = Programs(config)
        self._num_pages = num_pages
        self._pages = empty_pages(config, params, num_pages)
        self._cache: Cache | None = None
        self._slots = Slots()
        self._most_cached = cache_bytes // token_bytes(config, params)
        self._shapes: set[tuple[object, ...]] = set()
        self.row_sizes = sorted({size for size in (2, 8, 16) if size < max_rows} | {max_rows})

    def reset(self) -> None:
        """Empty stores, for instance because a step failed that they were given away to."""
        self._pages = []  # freed before new ones are made
        self.empty_slots()
        self._pages = empty_pages(self.config, self.params, self._num_pages)

    def empty_slots(self) -> None:
        """Rows that decode next are loaded from their pages."""
        self._cache = None
        self._slots.clear()

    @property
    def num_programs(self) -> int:
        """Distinct shapes run so far; each is one program, compiled or fetched from the cache."""
        return len(self._shapes)

    def places(self, rows: int) -> int:
        """The rows that a decode step computes for `rows` of them."""
        return _round_up(rows, self.row_sizes)

    def prefill(self, pieces: Sequence[PrefillPiece]) -> list[Scored]:
        """Computes keys and values of the pieces, in order; a later piece may build on an earlier one."""
        scored: list[Scored] = []
        for group in _prefill_groups(pieces):
            rows = _round_up(len(group), PREFILL_ROWS)
            length = _round_up(max(piece.count for piece in group), PREFILL_TOKENS)
            width = power_bucket(max(piece.start + piece.count for piece in group), _WIDTH)
            inputs = _prefill_inputs(group, rows, length, width)
            if any(piece.row.request.params.prompt_logprobs for piece in group):
                scored += self._prefill_scored(group, inputs)
            else:
                self._shapes.add(("prefill", rows, length, width))
                self._pages = self.programs.prefill(self.params, self._pages, inputs)
        return scored

    def decode(self, rows: Sequence[Row], beside: PrefillPiece | None = None) -> Drawn:
        """Computes each row's last token and draws its next one; and the keys and values of a piece of another row, by the same
        call if it is short enough."""
        size = self.places(len(rows))
        together = rows if beside is None else [*rows, beside.row]  # it will decode at that width soon
        width = bucket(max(len(row.tokens) for row in together), _WIDTH)
        length = beside_tokens(size)
        if beside is not None and (size * width > self._most_cached or beside.count > length):
            self.prefill([beside])
            return self.decode(rows)
        if size * width > self._most_cached:
            return self._decode_from_pages(rows, size, width)
        slots = self._load(rows, size, width)
        tokens, positions, write = np.zeros((3, size), np.int32)
        for row, slot in zip(rows, slots, strict=True):
            last = len(row.tokens) - 1
            tokens[slot], positions[slot], write[slot] = row.tokens[last], last, row.pages[last]
        inputs = {"tokens_B": tokens, "positions_B": positions, "write_B": write}
        piece = None if beside is None else _prefill_inputs([beside], 1, length, width)
        self._shapes.add(("forward", size, width, beside is not None))
        self._pages, self._cache, logits = self.programs.forward(self.params, self._pages, self._cache, inputs, piece)
        return self._draw(logits, rows, slots)

    def _decode_from_pages(self, rows: Sequence[Row], size: int, width: int) -> Drawn:
        self.empty_slots()
        tokens, positions, write = np.zeros((3, size, 1), np.int32)
        for b, row in enumerate(rows):
            last = len(row.tokens) - 1
            tokens[b], positions[b], write[b] = row.tokens[last], last, row.pages[last]
        table = _page_table([(row, len(row.tokens)) for row in rows], size, width)
        inputs = {"tokens_BT": tokens, "positions_BT": positions, "table_BW": table, "write_BT": write}
        slots = range(len(rows))
        self._shapes.add(("forward from pages", size, width))
        self._pages, logits = self.programs.forward_from_pages(self.params, self._pages, inputs)
        return self._draw(logits, rows, slots)

    def _load(self, rows: Sequence[Row], size: int, width: int) -> list[int]:
        """Slots of the rows, those that are new loaded from their pages."""
        placement = self._slots.place(rows, size, width)
        new = [(rows[at], placement.slots[at]) for at in placement.load]
        if placement.fresh:
            self._cache = None  # freed before the new one is made
            self._shapes.add(("load all", size, width))
            table = _page_table([(row, len(row.tokens) - 1) for row, _ in new], size, width)
            self._cache = self.programs.load_all(self._pages, table)
            return placement.slots
        count = min(_LOADED, size)
        for at in range(0, len(new), count):
            some = new[at : at + count]
            numbers = np.full(count, size, np.int32)
            numbers[: len(some)] = [slot for _, slot in some]
            table = _page_table([(row, len(row.tokens) - 1) for row, _ in some], count, width)
            self._shapes.add(("load some", size, width))
            self._cache = self.programs.load_some(self._cache, self._pages, numbers, table)
        return placement.slots

    def _draw(self, logits: Any, rows: Sequence[Row], slots: Sequence[int]) -> Drawn:
        """By one of few programs: plain, with filters, or with everything that a request may ask for."""
        size, vocab = logits.shape
        alternatives = any(row.request.params.top_logprobs for row in rows)
        changes = adjustments(rows, slots, size, vocab, even_if_none=alternatives)
        everything = changes is not None
        filtered = everything or any(row.request.params.filtered for row in rows)
        shapes = None if changes is None else tuple(getattr(x, "shape", None) for x in changes)
        self._shapes.add(("draw", size, filtered, shapes))
        settings = sampling_inputs(rows, slots, size, vocab)
        drawn = self.programs.draw(logits, settings, changes, filtered=filtered, alternatives=everything)
        return _taken(drawn, rows, slots, alternatives)

    def _prefill_scored(self, group: Sequence[PrefillPiece], inputs: dict[str, np.ndarray]) -> list[Scored]:
        rows, length = inputs["tokens_BT"].shape
        following = np.zeros((rows, length), np.int32)
        temperature = np.ones(rows, np.float32)
        for b, piece in enumerate(group):
            span = slice(piece.start + 1, piece.start + 1 + piece.count)
            following[b, : piece.count] = piece.row.tokens[span]
            temperature[b] = piece.row.request.params.temperature or 1.0
        self._shapes.add(("prefill scored", rows, length, inputs["table_BW"].shape[1]))
        self._pages, logprobs = self.programs.prefill_scored(self.params, self._pages, inputs, following, temperature)
        host = np.asarray(logprobs)
        return [Scored(piece.row, piece.start, host[b, : piece.count].tolist()) for b, piece in enumerate(group)]


def slot_widths(most: int) -> list[int]:
    """Widths of slots that rows of up to `most` tokens meet."""
    return sorted({bucket(n, _WIDTH) for n in range(1, most + 1)})


def page_widths(most: int) -> list[int]:
    """Widths of page tables that the prefill of rows of up to `most` tokens meets."""
    return sorted({power_bucket(n, _WIDTH) for n in range(1, most + 1)})


def _prefill_inputs(group: Sequence[PrefillPiece], rows: int, length: int, width: int) -> dict[str, np.ndarray]:
    """Of `run_over_pages`, for pieces of at most `length` tokens."""
    tokens, positions, write = np.zeros((3, rows, length), np.int32)
    for b, piece in enumerate(group):
        span = slice(piece.start, piece.start + piece.count)
        tokens[b, : piece.count] = piece.row.tokens[span]
        positions[b, : piece.count] = np.arange(span.start, span.stop)
        write[b, : piece.count] = piece.row.pages[span]
    table = _page_table([(piece.row, piece.start + piece.count) for piece in group], rows, width)
    return {"tokens_BT": tokens, "positions_BT": positions, "table_BW": table, "write_BT": write}


def _page_table(rows: Sequence[tuple[Row, int]], size: int, width: int) -> np.ndarray:
    """[size, width] pages of each row's first tokens; page 0 elsewhere."""
    table = np.zeros((size, width), np.int32)
    for b, (row, count) in enumerate(rows):
        table[b, :count] = row.pages[:count]
    return table


def _taken(drawn: Draw, rows: Sequence[Row], slots: Sequence[int], alternatives: bool) -> Drawn:
    host = jax.device_get(drawn)
    at = np.asarray(slots)
    best = None
    if alternatives and host.best_ids is not None:
        best = [
            [(int(t), float(x)) for t, x in zip(ids[: row.request.params.top_logprobs], values, strict=False)]
            for row, ids, values in zip(rows, host.best_ids[at], host.best_logprobs[at], strict=True)
        ]
    return Drawn(
        tokens=host.token[at].tolist(),
        logprobs=host.logprob[at].tolist(),
        raw_logprobs=host.raw_logprob[at].tolist(),
        tempered_logprobs=host.tempered_logprob[at].tolist(),
        best=best,
    )


def _round_up(n: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= n)


def _prefill_groups(pieces: Sequence[PrefillPiece]) -> list[list[PrefillPiece]]:
    """Pieces that run in one call: consecutive (order matters), split to the longest call, few enough rows.

    A row stands in a group at most once, and short pieces do not share a call with long ones: they would all be padded.
    """
    longest = PREFILL_TOKENS[-1]
    split = [
        PrefillPiece(piece.row, piece.start + at, min(longest, piece.count - at))
        for piece in pieces
        for at in range(0, piece.count, longest)
    ]
    groups: list[list[PrefillPiece]] = []
    for piece in split:
        size = _round_up(piece.count, PREFILL_TOKENS)
        last = groups[-1] if groups else []
        fits = last and len(last) < PREFILL_ROWS[-1] and _round_up(last[0].count, PREFILL_TOKENS) == size
        if fits and size < longest:
            last.append(piece)
        else:
            groups.append([piece])
    return groups
