"""A batch as a trainer's data loader gives it → token ids of each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

KEYS = "'messages' or 'instruction', or 'input_ids'/'prompts'"


class ChatTokenizer(Protocol):
    """What the generator needs of a tokenizer; `upweight.tokenizer.Tokenizer` has it."""

    pad_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str: ...

    def render(self, messages: Any) -> str: ...


@dataclass(frozen=True)
class Prompts:
    ids: list[list[int]]
    texts: list[str]
    metadata: list[dict[str, Any]]


def read_prompts(batch: Mapping[str, Any], tokenizer: ChatTokenizer) -> Prompts:
    """`ValueError` for an empty batch, an empty prompt, and a batch with none of the accepted keys."""
    if batch.get("messages") is not None:
        ids, texts = _templated(list(batch["messages"]), tokenizer)
    elif batch.get("instruction") is not None:
        ids, texts = _templated(_conversations(batch), tokenizer)
    else:
        given = batch.get("input_ids") if batch.get("input_ids") is not None else batch.get("prompts")
        if given is None:
            raise ValueError(f"the batch must contain either {KEYS}; it has {sorted(batch)}")
        ids = _token_rows(given, batch.get("attention_mask"), tokenizer.pad_id)
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    if not ids:
        raise ValueError("empty batch")
    for index, row in enumerate(ids):
        if not row:
            raise ValueError(f"prompt {index} of the batch is empty")
    metadata = list(batch.get("metadata") or [{} for _ in ids])
    if len(metadata) != len(ids):
        raise ValueError(f"metadata has {len(metadata)} entries for {len(ids)} prompts")
    return Prompts(ids, texts, metadata)


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 ids and bool mask, [B,P]."""
    width = max(len(row) for row in rows)
    ids = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for b, row in enumerate(rows):
        ids[b, width - len(row) :] = row
        mask[b, width - len(row) :] = True
    return ids, mask


def _templated(conversations: list[Any], tokenizer: ChatTokenizer) -> tuple[list[list[int]], list[str]]:
    texts = [tokenizer.render(messages) for messages in conversations]
    return [tokenizer.encode(text) for text in texts], texts


def _conversations(batch: Mapping[str, Any]) -> list[list[dict[str, str]]]:
    """instruction / input / output → system / user / assistant, empty ones skipped."""
    count = len(batch["instruction"])
    columns = [("system", batch["instruction"]), ("user", batch.get("input")), ("assistant", batch.get("output"))]
    for role, column in columns:
        if column is not None and len(column) != count:
            raise ValueError(f"the {role} column has {len(column)} entries for {count} instructions")
    return [
        [{"role": role, "content": column[i]} for role, column in columns if column is not None and column[i]]
        for i in range(count)
    ]


def _token_rows(given: Any, mask: Any, pad_id: int) -> list[list[int]]:
    rows = [np.asarray(row, np.int64).reshape(-1) for row in given]
    if mask is None:
        return [_without_edges(row, pad_id).tolist() for row in rows]
    masks = [np.asarray(m, bool) for m in mask]
    if [len(m) for m in masks] != [len(row) for row in rows]:
        raise ValueError("attention_mask and input_ids differ in shape")
    return [row[m].tolist() for row, m in zip(rows, masks, strict=True)]


def _without_edges(row: np.ndarray, pad_id: int) -> np.ndarray:
    """The row without an unbroken run of the pad id at either end; inside, the same id is a real token."""
    real = np.flatnonzero(row != pad_id)
    return row[real[0] : real[-1] + 1] if len(real) else row[:0]
