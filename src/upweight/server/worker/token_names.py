"""Tokens as log-prob entries name them, and where each begins in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upweight.inference.types import GenerationOutput
from upweight.server.worker.asked import Asked
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


def chat_logprobs(names: TokenNames, output: GenerationOutput) -> dict[str, Any]:
    """`choices[i].logprobs` of a chat answer: one entry a token drawn, the stop token included."""
    content = []
    for index, (token, logprob) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        others = possible(output.top_logprobs[index]) if output.top_logprobs else []
        entry = names.entry(token, logprob)
        content.append({**entry, "top_logprobs": [names.entry(other, value) for other, value in others]})
    return {"content": content, "refusal": None}


def text_logprobs(names: TokenNames, tokenizer: Tokenizer, asked: Asked, choice: int, output: GenerationOutput) -> Any:
    """`choices[i].logprobs` of a text answer, with `echo` those of the prompt before it."""
    prompt = asked.prompt_of(choice) if asked.echo else []
    before: Sequence[float | None] = (output.prompt_logprobs or [None] * len(prompt)) if asked.echo else []
    text = prompt_text(tokenizer, prompt)
    offsets = [
        *_offsets(tokenizer, prompt, 0, skip=False),
        *_offsets(tokenizer, output.token_ids, len(text), skip=True),
    ]
    return {
        "tokens": [names.name(token) for token in [*prompt, *output.token_ids]],
        "token_logprobs": [*before, *output.logprobs],
        "top_logprobs": _alternatives(names, asked, choice, output),
        "text_offset": offsets,
    }


def possible(alternatives: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Filters and grammars may leave fewer tokens than were asked for."""
    return [(token, logprob) for token, logprob in alternatives if logprob > LEAST_LOGPROB]


def prompt_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """What `echo` puts before the answer; special tokens are spelled out."""
    return tokenizer.decode(prompt, skip_special_tokens=False)


def _alternatives(names: TokenNames, asked: Asked, choice: int, output: GenerationOutput) -> Any:
    if not asked.params[choice].top_logprobs:
        return None
    told = []
    for token, logprob, others in zip(output.token_ids, output.logprobs, output.top_logprobs, strict=True):
        table: dict[str, float] = {}
        for other, value in [*possible(others), (token, logprob)]:  # the drawn token is always among them
            table.setdefault(names.name(other), value)
        told.append(table)
    return told


def _offsets(tokenizer: Tokenizer, ids: Sequence[int], start: int, *, skip: bool) -> list[int]:
    stream, offsets = TextStream(tokenizer, skip_special_tokens=skip), []
    for token in ids:
        offsets.append(start)
        start += len(stream.push(token))
    return offsets
