"""What a request asks for, whatever the API it came through."""

from __future__ import annotations

from dataclasses import dataclass

from upweight.inference.constraints import Grammars
from upweight.inference.types import SamplingParams
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.tool_calls import ToolStyle


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The model as the readers of requests need to know it."""

    tokenizer: Tokenizer
    vocab_size: int  # rows of the output layer
    max_context: int  # tokens of prompt and answer together
    default_tokens: int  # max_tokens of a request that names none
    timeout: float | None = None  # seconds after which a request is aborted
    grammars: Grammars


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
