"""What a request asks for, whatever the API it came through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upweight.errors import RequestError
from upweight.inference.constraints import Grammars
from upweight.inference.types import SamplingParams
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.tool_calls import ToolStyle

SHRINKING = 4  # characters of a text for one that is left of it


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The model as the readers of requests need to know it."""

    tokenizer: Tokenizer
    vocab_size: int  # rows of the output layer
    max_context: int  # tokens of prompt and answer together
    default_tokens: int  # max_tokens of a request that names none
    timeout: float | None = None  # seconds after which a request is aborted
    grammars: Grammars
    longest_text: int  # characters; a longer text cannot fit, whatever it says

    def encode(self, text: str, field: str) -> list[int]:
        """Ids of a text that may fit the context; to encode a far longer one would cost everybody time and memory."""
        if len(text) > self.longest_text:
            message = f"{field} too long: {len(text)} characters, at most {self.longest_text} can fit the context"
            raise RequestError(message, field=field)
        try:
            return self.tokenizer.encode(text)
        except RequestError as error:
            raise RequestError(f"{field}: {error}", field=field) from None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode(self.tokenizer.render(messages, tools=tools or None, keep_calls=True), "messages")


def longest_text(tokenizer: Tokenizer, max_context: int) -> int:
    """Characters that `max_context` tokens may stand for at most; normalizers may shrink a text before it is cut up."""
    longest_token = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
    return SHRINKING * max_context * longest_token


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The functions that an answer may call."""

    names: frozenset[str]
    style: ToolStyle
    several: bool = True  # more than one call an answer


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One parsed request: every prompt is answered `n` times."""

    prompts: list[list[int]]
    params: list[SamplingParams]  # one a choice: those of the first prompt, then those of the second, …
    n: int = 1
    logprobs: bool = False
    token_ids: bool = False
    token_id_names: bool = False  # tokens in log-probs are called token_id:N
    stream: bool = False
    usage_in_stream: bool = False
    echo: bool = False
    prompt_logprobs: bool = False  # told as a field of their own
    tools: ToolUse | None = None
    timeout: float | None = None

    def prompt_of(self, choice: int) -> list[int]:
        return self.prompts[choice // self.n]
