"""Compiles ahead of time what requests will need, by running the steps once on rows that belong to nobody.

Invariant: afterwards a request whose prompt and answer fit the context asked for compiles nothing, unless it has more than 16 biased
tokens, a penalty window of more than 64, or its prompt's log-probs were left out here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from upweight.inference.runner import PREFILL_ROWS, PREFILL_TOKENS, ModelRunner, page_widths, slot_widths
from upweight.inference.scheduler import PrefillPiece, Row
from upweight.inference.types import Request, SamplingParams

PLAIN = SamplingParams()
SCORED = SamplingParams(prompt_logprobs=True)
FILTERED = SamplingParams(top_p=0.9)
ADJUSTED = SamplingParams(top_logprobs=1)


@dataclass(frozen=True)
class WarmUp:
    programs: int  # distinct shapes that are ready
    seconds: float  # what that took, mostly compiling


def warm_up(runner: ModelRunner, context: int, *, prompt_logprobs: bool = False) -> WarmUp:
    """For rows of up to `context` tokens. Writes to the page that nobody owns; call it while no row runs."""
    began, before = time.perf_counter(), runner.num_programs
    for pieces in _prefills(context, PLAIN):
        runner.prefill(pieces)
    if prompt_logprobs:
        for pieces in _prefills(context, SCORED):
            runner.prefill(pieces)
    for size in runner.row_sizes:
        for width in slot_widths(context):
            rows = [_row(width, PLAIN) for _ in range(size)]
            runner.decode(rows)
            runner.decode([_row(width, PLAIN), *rows[1:]])  # a new row is loaded beside the others
            if size > 1:
                runner.decode(rows, PrefillPiece(_row(width, PLAIN), 0, 1))
        for row in (_row(width, FILTERED), _row(width, ADJUSTED), _masked(width, runner.config.vocab_size)):
            runner.decode([row, *rows[1:]])
    runner.empty_slots()
    return WarmUp(programs=runner.num_programs - before, seconds=time.perf_counter() - began)


def _prefills(context: int, params: SamplingParams) -> Iterator[list[PrefillPiece]]:
    """One call of each shape: pieces of `shorter + 1` to `length` tokens are padded to `length`, also beyond the table's width."""
    for width in page_widths(context):
        for shorter, length in pairwise((0, *PREFILL_TOKENS)):
            count = min(length, width)
            for rows in PREFILL_ROWS:
                if count > shorter and (rows == 1 or length < PREFILL_TOKENS[-1]):
                    yield [PrefillPiece(_row(width + 1, params), width - count, count) for _ in range(rows)]


def _row(tokens: int, params: SamplingParams) -> Row:
    request = Request(id=0, prompt_ids=(0,) * tokens, params=params, on_done=lambda _: None)
    return Row(request=request, tokens=[0] * tokens, limit=tokens, seed=0, pages=[0] * tokens)


def _masked(tokens: int, vocab_size: int) -> Row:
    row = _row(tokens, replace(ADJUSTED, min_tokens=1))
    row.allowed = b"\xff" * -(-vocab_size // 8)
    return row
