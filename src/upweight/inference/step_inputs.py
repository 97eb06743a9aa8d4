"""Rows of a decode step → the arrays that sampling takes (host side)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from upweight.inference.scheduler import Row
from upweight.ops.sampling import Adjustments, SamplingInputs

LEAST_RECENT, LEAST_BIAS = 64, 16


def sampling_inputs(rows: Sequence[Row], slots: Sequence[int], size: int, vocab_size: int) -> SamplingInputs:
    """Row i stands at `slots[i]` of `size` places; empty places draw from whatever they hold, unread."""
    temperature, top_p = np.ones((2, size), np.float32)
    min_p = np.zeros(size, np.float32)
    top_k, drawn = np.zeros((2, size), np.int32)
    seed = np.zeros((size, 2), np.uint32)
    alternatives = np.zeros(size, np.bool_)
    for row, slot in zip(rows, slots, strict=True):
        params = row.request.params
        temperature[slot], top_p[slot], min_p[slot] = params.temperature, params.top_p, params.min_p
        top_k[slot] = min(params.top_k, vocab_size)
        seed[slot] = row.seed >> 32, row.seed & 0xFFFFFFFF
        drawn[slot] = row.num_output
        alternatives[slot] = params.top_logprobs > 0
    return SamplingInputs(temperature, top_k, top_p, min_p, seed, drawn, alternatives)  # type: ignore[arg-type]


def adjustments(
    rows: Sequence[Row], slots: Sequence[int], size: int, vocab_size: int, *, even_if_none: bool = False
) -> Adjustments | None:
    """What rows ask for beyond temperature and filters; None when no row asks for anything, unless `even_if_none`."""
    if not even_if_none and not any(row.request.params.adjusted for row in rows):
        return None
    biases: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    recent: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    repetition = np.ones(size, np.float32)
    frequency, presence = np.zeros((2, size), np.float32)
    masks: dict[int, bytes] = {}
    for row, slot in zip(rows, slots, strict=True):
        params = row.request.params
        biases[slot] = list(params.logit_bias)
        if row.num_output < params.min_tokens:
            biases[slot] += [(token, -np.inf) for token in sorted(row.stop_ids)]
        repetition[slot] = params.repetition_penalty
        frequency[slot], presence[slot] = params.frequency_penalty, params.presence_penalty
        if params.penalised and params.rep_window:
            recent[slot] = [(token, float(count)) for token, count in Counter(row.tokens[-params.rep_window :]).items()]
        if row.allowed is not None:
            masks[slot] = row.allowed
    bias_ids, bias = _table(biases, LEAST_BIAS)
    recent_ids, counts = _table(recent, LEAST_RECENT)
    allowed = _masks(masks, size, vocab_size) if masks else None
    return Adjustments(bias_ids, bias, recent_ids, counts, repetition, frequency, presence, allowed)  # type: ignore[arg-type]


def _table(lists: Sequence[Sequence[tuple[int, float]]], least: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values [rows, widest]; id −1 where a row has none."""
    width = least
    while width < max(map(len, lists)):
        width *= 8
    ids = np.full((len(lists), width), -1, np.int32)
    values = np.zeros((len(lists), width), np.float32)
    for b, pairs in enumerate(lists):
        for i, (token, value) in enumerate(pairs):
            ids[b, i], values[b, i] = token, value
    return ids, values


def _masks(masks: dict[int, bytes], size: int, vocab_size: int) -> np.ndarray:
    table = np.full((size, -(-vocab_size // 8)), 0xFF, np.uint8)
    for slot, mask in masks.items():
        bits = np.frombuffer(mask, np.uint8)[: table.shape[1]]
        table[slot, : len(bits)] = bits
        table[slot, len(bits) :] = 0
    return table
