"""What a tokenizer is made of, as each kind of file gives it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer before it gets its methods."""

    core: tokenizers.Tokenizer  # text ↔ ids
    eos_ids: tuple[int, ...]  # ids that end an answer, the most usual one first
    pad_id: int  # id to fill rows with; it may also be an end id, so masks must come from lengths
    chat_template: str | None = None
    tool_template: str | None = None  # a template of its own for conversations with tools, where the model has one
    named_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, … → text
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json, other entries


def unique_ids(ids: Iterable[int | None]) -> tuple[int, ...]:
    """`ids` in their order, without None and repetitions."""
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))
