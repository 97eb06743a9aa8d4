"""The nouns of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol


class FinishReason(StrEnum):
    STOP = "stop"  # a stop id or stop string
    LENGTH = "length"  # max_tokens or the context is used up
    REJECTED = "rejected"  # the prompt can never fit
    ABORTED = "aborted"  # cancelled, time limit, engine stopped
    ERROR = "error"  # this request failed; see GenerationOutput.error


class TokenConstraint(Protocol):
    """Which tokens may come next in one answer, for instance those that keep it valid JSON. Used in the engine's thread."""

    def allowed(self) -> bytes | None:
        """Bit i % 8 of byte i // 8 is 1 where token i may be drawn; None = every token may."""

    def accept(self, token_id: int) -> None:
        """The token was drawn."""


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
    rep_window: int = 64  # last tokens of prompt and output together that penalties look at
    presence_penalty: float = 0.0  # subtracted once from tokens that occur there
    repetition_penalty: float = (
        1.0  # divides positive and multiplies negative logits of tokens that occur there; 1 = off
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit) before everything else
    min_p: float = 0.0  # leaves out tokens less likely than this share of the likeliest; 0 = off
    top_logprobs: int = 0  # this many likeliest tokens are reported beside each one drawn
    prompt_logprobs: bool = False  # log-probs of the prompt's own tokens, at `temperature`
    constraint: Callable[[], TokenConstraint] | None = None  # makes a new one for each answer

    @property
    def filtered(self) -> bool:
        """Whether the distribution drawn from leaves tokens out (a greedy row is compared by raw log-probs)."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Whether tokens that occurred before are made less likely."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def adjusted(self) -> bool:
        """Whether anything beside temperature and filters changes the distribution."""
        return self.penalised or self.min_tokens > 0 or bool(self.logit_bias) or self.constraint is not None

    @property
    def apart(self) -> bool:
        """Whether the model's own distribution at this temperature is neither the raw one nor the one drawn from."""
        return self.temperature not in (0.0, 1.0) and (self.filtered or self.adjusted)


@dataclass(kw_only=True)
class SampledTokens:
    """Tokens of one answer in the order they were drawn; the lists have one entry a token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    tempered_logprobs: list[float] = field(
        default_factory=list
    )  # log_softmax(logits / T); only where params are `apart`
    token_versions: list[int] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(
        default_factory=list
    )  # per token, if asked: (id, log-prob), falling

    def lists(self, start: int = 0, end: int | None = None) -> dict[str, list[Any]]:
        """Tokens start to end (the last, if None), for the constructor of a part."""
        return {f.name: getattr(self, f.name)[start:end] for f in fields(SampledTokens)}


@dataclass(kw_only=True)
class TextPiece(SampledTokens):
    """Text of an answer that can no longer change, and the tokens that spell it.

    The tokens of all pieces of an answer, joined, are a beginning of the whole; those that spell no text may be missing at the end.
    """

    text: str = ""
    prompt_logprobs: list[float | None] | None = None  # of the whole prompt, if asked


@dataclass(kw_only=True)
class GenerationOutput(SampledTokens):
    """What became of one request; the lists have one entry a sampled token, the stop token included."""

    prompt_logprobs: list[float | None] | None = None  # if asked: one a prompt token, None for the first
    finish_reason: FinishReason | None = None
    text: str = ""
    prompt_len: int = 0
    cached_tokens: int = 0
    cached_version: int | None = None  # weights version of the keys and values that were reused
    seed: int = 0
    error: str | None = None

    @property
    def weights_version(self) -> int | None:
        """Version that drew the first token; None when nothing was drawn."""
        return self.token_versions[0] if self.token_versions else None


OnDone = Callable[[GenerationOutput], None]
OnText = Callable[[TextPiece], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to make. Callbacks run in the engine's thread and must return at once."""

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    on_done: OnDone
    on_text: OnText | None = None
    deadline: float | None = None  # time.monotonic() after which the request is aborted
