"""Tokens as log-prob entries name them, and where each begins in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upweight.inference.types import SampledTokens
from upweight.tokenizer import TextStream, Tokenizer

LEAST_LOGPROB = -9999.0  # below it a token could not have been drawn: it is no alternative


class TokenNames:
    """`token_id:N` where the contract of rollouts asks for ids; else text and bytes, as OpenAI names them."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = None if self._as_ids else list(self._tokenizer.token_bytes(token_id))
        return {"token": self.name(token_id), "logprob": logprob, "bytes": spelled}


class ChatLogprobs:
    """`choices[i].logprobs` of a chat answer, whole or part by part: one entry a token drawn, the stop token included."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def of(self, tokens: SampledTokens) -> dict[str, Any]:
        entry = self._names.entry
        content = []
        for index, (token, logprob) in enumerate(zip(tokens.token_ids, tokens.logprobs, strict=True)):
            others = possible(tokens.top_logprobs[index]) if tokens.top_logprobs else []
            content.append({**entry(token, logprob), "top_logprobs": [entry(*other) for other in others]})
        return {"content": content, "refusal": None}


class TextLogprobs:
    """`choices[i].logprobs` of a text answer, whole or part by part; with `echo` the prompt's come first."""

    def __init__(self, names: TokenNames, tokenizer: Tokenizer, *, alternatives: bool, text_before: str) -> None:
        self._names = names
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._stream = TextStream(tokenizer)
        self._at = len(text_before)

    def of(self, tokens: SampledTokens) -> dict[str, Any]:
        offsets, self._at = _offsets(self._stream, tokens.token_ids, self._at)
        return {
            "tokens": [self._names.name(token) for token in tokens.token_ids],
            "token_logprobs": tokens.logprobs,
            "top_logprobs": _alternatives(self._names, tokens) if self._alternatives else None,
            "text_offset": offsets,
        }

    def of_prompt(self, prompt: Sequence[int], logprobs: Sequence[float | None] | None) -> dict[str, Any]:
        offsets, _ = _offsets(TextStream(self._tokenizer, skip_special_tokens=False), prompt, 0)
        return {
            "tokens": [self._names.name(token) for token in prompt],
            "token_logprobs": list(logprobs or [None] * len(prompt)),
            "top_logprobs": None,
            "text_offset": offsets,
        }


def possible(alternatives: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Filters and grammars may leave fewer tokens than were asked for."""
    return [(token, logprob) for token, logprob in alternatives if logprob > LEAST_LOGPROB]


def prompt_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """What `echo` puts before the answer; special tokens are spelled out."""
    return tokenizer.decode(prompt, skip_special_tokens=False)


def _alternatives(names: TokenNames, tokens: SampledTokens) -> list[dict[str, float]]:
    told = []
    for token, logprob, others in zip(tokens.token_ids, tokens.logprobs, tokens.top_logprobs, strict=True):
        table: dict[str, float] = {}
        for other, value in [*possible(others), (token, logprob)]:  # the drawn token is always among them
            table.setdefault(names.name(other), value)
        told.append(table)
    return told


def _offsets(stream: TextStream, ids: Sequence[int], start: int) -> tuple[list[int], int]:
    """Where each token's text begins, and where the next one's will."""
    offsets = []
    for token in ids:
        offsets.append(start)
        start += len(stream.push(token))
    return offsets, start
