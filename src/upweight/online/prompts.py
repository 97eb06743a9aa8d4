"""A batch as a trainer's data loader gives it → token ids of each prompt.

Invariants
- Only a mask, or an unbroken run of the pad id at an edge of a row, makes a token padding; inside a row it is a real token.
- Input that is unpadded or padded on the left already comes back unchanged.
- A templated prompt begins with one BOS at most.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from upweight.errors import UpweightError
from upweight.inference.arguments import token_ids

LARGEST_ID = 2**31 - 1
KEYS = "'messages' or 'instruction', or 'input_ids'/'prompts'"


@dataclass(frozen=True)
class Prompts:
    """Prompts of one batch; `padded` and `mask` are [B,P], padded on the left."""

    ids: list[list[int]]
    texts: list[str]
    metadata: list[dict[str, Any]]
    padded: np.ndarray  # int32
    mask: np.ndarray  # bool


def read_prompts(batch: Mapping[str, Any], tokenizer: Any) -> Prompts:
    """`ValueError` for an empty batch, an empty prompt, what is no token id, and a batch with none of the accepted keys.

    The tokenizer is `upweight.tokenizer.Tokenizer` or one with the methods of Hugging Face's (`apply_chat_template`).
    """
    padded = None
    if batch.get("messages") is not None:
        ids, texts = _templated(_messages(batch["messages"]), tokenizer)
    elif batch.get("instruction") is not None:
        ids, texts = _templated(_conversations(batch), tokenizer)
    else:
        name = "input_ids" if batch.get("input_ids") is not None else "prompts"
        given = batch.get(name)
        if given is None:
            raise ValueError(f"the batch must contain either {KEYS}; it has {sorted(batch)}")
        ids, padded = _token_rows(name, given, batch.get("attention_mask"), pad_id_of(tokenizer))
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    if not ids:
        raise ValueError("empty batch")
    for index, row in enumerate(ids):
        if not row:
            raise ValueError(f"prompt {index} of the batch is empty")
    metadata = list(batch.get("metadata") or [{} for _ in ids])
    if len(metadata) != len(ids):
        raise ValueError(f"metadata has {len(metadata)} entries for {len(ids)} prompts")
    return Prompts(ids, texts, metadata, *(padded or left_padded(ids, pad_id_of(tokenizer))))


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 ids and bool mask, [B,P]."""
    width = max(len(row) for row in rows)
    ids = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for b, row in enumerate(rows):
        ids[b, width - len(row) :] = row
        mask[b, width - len(row) :] = True
    return ids, mask


def pad_id_of(tokenizer: Any) -> int:
    """The tokenizer's pad id, else 0."""
    for name in ("pad_id", "pad_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None:
            return int(value)
    return 0


def _templated(conversations: list[Any], tokenizer: Any) -> tuple[list[list[int]], list[str]]:
    texts = _rendered(conversations, tokenizer) if conversations else []
    return [_encoded(text, tokenizer) for text in texts], texts


def _rendered(conversations: list[Any], tokenizer: Any) -> list[str]:
    """All in one call where the tokenizer can, else one by one."""
    apply = getattr(tokenizer, "apply_chat_template", None)
    if apply is None:
        return [tokenizer.render(messages) for messages in conversations]
    options = {"tokenize": False, "add_generation_prompt": True}
    try:
        texts = apply(conversations, **options)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, jinja2.TemplateError, UpweightError):
        texts = None  # one at a time says what is wrong, if anything is
    if isinstance(texts, list | tuple) and len(texts) == len(conversations):
        return list(texts)
    return [apply(messages, **options) for messages in conversations]


def _encoded(text: str, tokenizer: Any) -> list[int]:
    """Ids of a rendered template, which has written what special tokens it wants."""
    declared = inspect.signature(tokenizer.encode).parameters
    takes = "add_special_tokens" in declared or any(p.kind is p.VAR_KEYWORD for p in declared.values())
    ids = list(tokenizer.encode(text, add_special_tokens=False) if takes else tokenizer.encode(text))
    bos = next((b for name in ("bos_id", "bos_token_id") if (b := getattr(tokenizer, name, None)) is not None), None)
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def _messages(given: Any) -> list[Any]:
    conversations = list(given)
    if any(isinstance(entry, Mapping | str) for entry in conversations):
        raise ValueError("messages must be a list of conversations, each a list of messages; it is one conversation")
    return conversations


def _conversations(batch: Mapping[str, Any]) -> list[list[dict[str, str]]]:
    """instruction / input / output → system / user / assistant, empty ones skipped."""
    columns = [("system", "instruction"), ("user", "input"), ("assistant", "output")]
    found: list[tuple[str, str, Any]] = [
        (role, name, batch[name]) for role, name in columns if batch.get(name) is not None
    ]
    for _, name, column in found:
        if isinstance(column, str):
            raise ValueError(f"{name} must be a list of texts, it is one text")
        if len(column) != len(batch["instruction"]):
            raise ValueError(f"{name} has {len(column)} entries for {len(batch['instruction'])} instructions")
    rows = [
        [
            {"role": role, "content": str(column[i])}
            for role, _, column in found
            if column[i] is not None and len(column[i])
        ]
        for i in range(len(batch["instruction"]))
    ]
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {index} of the batch is empty: instruction, input and output are")
    return rows


def _token_rows(
    name: str, given: Any, mask: Any, pad_id: int
) -> tuple[list[list[int]], tuple[np.ndarray, np.ndarray] | None]:
    """Real tokens of each row, and the rows themselves with their mask where they can stay as they are."""
    rows = [_token_row(f"{name}[{index}]", row) for index, row in enumerate(given)]
    masks = [_real(row, pad_id) for row in rows] if mask is None else [np.asarray(m, bool).reshape(-1) for m in mask]
    if [len(m) for m in masks] != [len(row) for row in rows]:
        raise ValueError("attention_mask and input_ids differ in shape")
    ids = [row[m].tolist() for row, m in zip(rows, masks, strict=True)]
    one_width = len({len(row) for row in rows}) == 1
    if one_width and all((np.diff(m.astype(np.int8)) >= 0).all() for m in masks):
        return ids, (np.stack(rows).astype(np.int32), np.stack(masks))
    return ids, None


def _token_row(name: str, given: Any) -> np.ndarray:
    """int64 [P]; arrays of whole floats will do."""
    row = np.asarray(given)
    if row.ndim != 1:
        form = "one token id: put the prompt in a list" if row.ndim == 0 else f"an array of shape {row.shape}"
        raise ValueError(f"{name} must be a prompt, a list of token ids; it is {form}")
    ids = token_ids(row, name)
    if wrong := [i for i in ids if not 0 <= i <= LARGEST_ID]:
        raise ValueError(f"{name} holds {wrong[0]}; a token id is a whole number from 0 to {LARGEST_ID}")
    return np.array(ids, np.int64)


def _real(row: np.ndarray, pad_id: int) -> np.ndarray:
    """True but on an unbroken run of the pad id at either end."""
    real = np.zeros(len(row), bool)
    there = np.flatnonzero(row != pad_id)
    if len(there):
        real[there[0] : there[-1] + 1] = True
    return real
