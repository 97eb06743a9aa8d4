"""The nouns of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"  # a stop id or stop string
    LENGTH = "length"  # max_tokens or the context is used up
    REJECTED = "rejected"  # the prompt can never fit
    ABORTED = "aborted"  # cancelled, time limit, engine stopped
    ERROR = "error"  # this request failed; see GenerationOutput.error


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one completion is drawn. Over HTTP the defaults are those of the OpenAI API."""

    max_tokens: int | None = None  # None = as much as the context holds
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    seed: int | None = None  # None = a fresh one, reported back
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0  # stop ids cannot be drawn before
    frequency_penalty: float = 0.0  # subtracted per occurrence, after the filters and not divided by the temperature
    rep_window: int = 64  # last tokens of prompt and output together that are counted

    @property
    def filtered(self) -> bool:
        """Whether the distribution drawn from leaves tokens out (a greedy row is compared by raw log-probs)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    @property
    def adjusted(self) -> bool:
        """Whether a penalty or a least length changes the distribution."""
        return self.frequency_penalty != 0 or self.min_tokens > 0


@dataclass(kw_only=True)
class GenerationOutput:
    """What became of one request; the lists have one entry a sampled token, the stop token included."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    text: str = ""
    prompt_len: int = 0
    cached_tokens: int = 0
    seed: int = 0
    error: str | None = None


OnDone = Callable[[GenerationOutput], None]
OnText = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to make. Callbacks run in the engine's thread and must return at once."""

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    on_done: OnDone
    on_text: OnText | None = None  # pieces of text that can no longer change
    deadline: float | None = None  # time.monotonic() after which the request is aborted
