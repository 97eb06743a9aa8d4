"""A stored sample → what a person can read: text, pieces with their numbers, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from sqlalchemy import Row

from upweight.server.store.rows import UNKNOWN_VERSION
from upweight.server.store.versions import UNTRAINED

if TYPE_CHECKING:
    from upweight.tokenizer import Tokenizer

PREVIEW = 240  # characters of the prompt's end and of the answer's beginning that a list shows
PREVIEW_TOKENS = 160  # tokens that are decoded for them


def short_view(row: Row, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One line of a list. `prompt` (its end) and `text` (of the trained tokens) leave special tokens out, and are null where the model's tokenizer cannot be read."""
    tokens_T, mask_T = _array(row.token_ids, "<i4"), _array(row.mask, "u1")
    trained = np.flatnonzero(mask_T)
    first = int(trained[0]) if len(trained) else len(tokens_T)
    return {
        **_common(row),
        "tokens": len(tokens_T),
        "trained_tokens": len(trained),
        "prompt": _text(tokenizer, tokens_T[max(0, first - PREVIEW_TOKENS) : first])[-PREVIEW:] if tokenizer else None,
        "text": _text(tokenizer, tokens_T[trained[:PREVIEW_TOKENS]])[:PREVIEW] if tokenizer else None,
    }


def whole_view(row: Row, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A sample with everything that is known of each token; lists have one entry per token, null where nothing is known."""
    tokens_T = _array(row.token_ids, "<i4")
    return {
        **_common(row),
        "token_ids": tokens_T.tolist(),
        "pieces": pieces(tokenizer, tokens_T.tolist()) if tokenizer else [f"⟨{token}⟩" for token in tokens_T.tolist()],
        "mask": _array(row.mask, "u1").tolist(),
        "logprobs": _numbers(row.logprobs),
        "raw_logprobs": _numbers(row.raw_logprobs),
        "versions": None
        if row.versions is None
        else [None if version == UNKNOWN_VERSION else version for version in _array(row.versions, "<i4").tolist()],
        "temperatures": _numbers(row.temperatures),
        "metadata": row.metadata,
        "debug_info": row.debug_info,
    }


def pieces(tokenizer: Tokenizer, token_ids: Iterable[int]) -> list[str]:
    """The text of each token, special ones included. Joined they are the text of all; a character whose bytes
    are spread over several tokens stands with the last of them."""
    from upweight.tokenizer import TextStream

    stream = TextStream(tokenizer, skip_special_tokens=False)
    found = [stream.push(token_id) for token_id in token_ids]
    if found and (rest := stream.flush()):
        found[-1] += rest
    return found


def matches(row: Row, words: str, tokenizer: Tokenizer | None) -> bool:
    """Whether `words` (lower case) stand in the sample's text, id, task, metadata or debug_info."""
    told = f"{row.id}\n{row.task_id}\n{row.metadata}\n{row.debug_info}".lower()
    return words in told or (tokenizer is not None and words in _text(tokenizer, _array(row.token_ids, "<i4")).lower())


def staleness(row: Row) -> int | None:
    """As the SDK's scheduler counts it: batch index - 1 - version of the oldest trained token; -1 is on-policy."""
    if row.versions is None:
        return None
    versions_T = _array(row.versions, "<i4")
    known = versions_T[(versions_T != UNKNOWN_VERSION) & (_array(row.mask, "u1") != 0)]
    return int(row.batch_index - 1 - known.min()) if len(known) else None


def histogram(rows: Iterable[Row]) -> dict[str, Any]:
    """How many samples have which staleness; `unknown`: no completion of this job explains them, or not joined yet."""
    counts = Counter(staleness(row) for row in rows)
    unknown = counts.pop(None, 0)
    return {
        "counts": {str(age): counts[age] for age in sorted(age for age in counts if age is not None)},
        "unknown": unknown,
    }


def _common(row: Row) -> dict[str, Any]:
    return {
        "id": row.id,
        "batch_index": row.batch_index,
        "task_id": row.task_id,
        "normalized_reward": row.reward,
        "reward": row.raw_reward,
        "fate": row.fate or UNTRAINED,
        "matched": row.matched,
        "filtered": row.filtered,
        "staleness": staleness(row),
    }


def _array(data: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(data, dtype=dtype)


def _numbers(data: bytes | None) -> list[float | None] | None:
    """float32 row → numbers with as many digits as float32 holds, NaN as null."""
    if data is None:
        return None
    return [None if number != number else float(f"{number:.7g}") for number in _array(data, "<f4").tolist()]


def _text(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    return tokenizer.decode(tokens.tolist())
