"""OpenAI answers as server-sent events.

Invariants
- Text, token ids and log-probs of a choice's chunks, joined, are those of the same answer that is not streamed.
- A chunk tells the tokens whose text ends with it; tokens without text, such as the stop token, come with the closing chunk.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from upweight.inference.types import GenerationOutput, SampledTokens, TextPiece
from upweight.server.error_bodies import error_body
from upweight.server.worker.openai_answers import (
    OpenAIAnswers,
    called,
    told_at_end,
    told_of_tokens,
    usage,
)
from upweight.server.worker.running import Running
from upweight.server.worker.spoken import ContentStream
from upweight.server.worker.token_names import TextLogprobs


async def stream_events(running: Running, answers: OpenAIAnswers) -> AsyncIterator[bytes]:
    """Each event ends with an empty line; the last one is `[DONE]`, or an error after which nothing follows."""
    asked = running.asked
    base = {**answers.base, "object": "chat.completion.chunk"} if answers.chat else answers.base
    choices = [_Choice(answers, index) for index in range(len(asked.params))]
    outputs: list[GenerationOutput] = []
    for choice in choices:
        for chunk in choice.opening():
            yield _event({**base, **chunk})
    async for index, item in running.items():
        if isinstance(item, GenerationOutput):
            if problem := running.failure(item):
                yield _event(error_body(*problem))
                return
            outputs.append(item)
        chunks = choices[index].push(item) if isinstance(item, TextPiece) else choices[index].end(item)
        for chunk in chunks:
            yield _event({**base, **chunk})
    if asked.usage_in_stream:
        yield _event({**base, "choices": [], "usage": usage(asked, outputs)})
    yield b"data: [DONE]\n\n"


class _Choice:
    """The chunks of one choice."""

    def __init__(self, answers: OpenAIAnswers, index: int) -> None:
        self._answers = answers
        self._index = index
        self._content = ContentStream(answers.asked.tools)
        self._logprobs = answers.logprobs(index)
        self._heard = SampledTokens()
        self._text_ends: list[int] = []  # of each token heard, at least: where its piece ends
        self._text = 0  # characters heard
        self._told = 0  # tokens told
        # The log-probs of an echoed prompt are known once its first token is drawn.
        self._echo_waits = answers.asked.echo and self._logprobs is not None

    def opening(self) -> Iterator[dict[str, Any]]:
        if self._answers.chat:
            yield self._chunk({"role": "assistant", "content": ""})
        elif not self._echo_waits and (echoed := self._answers.echoed(self._index)):
            yield self._chunk(self._said(echoed))

    def push(self, piece: TextPiece) -> Iterator[dict[str, Any]]:
        yield from self._echo(piece.prompt_logprobs)
        content = self._content.push(piece.text)
        self._text += len(piece.text)
        for name, values in piece.lists().items():
            getattr(self._heard, name).extend(values)
        self._text_ends += [self._text] * len(piece.token_ids)
        if content:
            yield self._chunk(self._said(content), self._tokens(self._heard, self._spelled(self._content.sent)))

    def end(self, output: GenerationOutput) -> Iterator[dict[str, Any]]:
        yield from self._echo(output.prompt_logprobs)
        rest = self._content.finish(self._answers.tokenizer, output)
        if rest.content:
            upto = self._spelled(self._content.sent + len(rest.content))
            yield self._chunk(self._said(rest.content), self._tokens(output, upto))
        tools = self._answers.asked.tools
        if rest.calls and tools is not None:
            calls = [{"index": i, **called(call, tools)} for i, call in enumerate(rest.calls)]
            yield self._chunk({"tool_calls": calls}, self._tokens(output, len(self._text_ends)))
        closing = self._chunk(
            {} if self._answers.chat else self._said(""),
            {
                **self._tokens(output, len(output.token_ids)),
                **told_at_end(output, bool(rest.calls), output.weights_version),
            },
        )
        yield {
            **closing,
            "inference_version": output.weights_version,
            **self._answers.of_prompt(self._index, output),
        }

    def _echo(self, logprobs: list[float | None] | None) -> Iterator[dict[str, Any]]:
        if not self._echo_waits or not isinstance(self._logprobs, TextLogprobs):
            return
        self._echo_waits = False
        told = self._logprobs.of_prompt(self._answers.asked.prompt_of(self._index), logprobs)
        yield self._chunk(self._said(self._answers.echoed(self._index)), {"logprobs": told})

    def _spelled(self, end: int) -> int:
        """How many tokens' text ends within the first `end` characters."""
        return bisect.bisect_right(self._text_ends, end)

    def _tokens(self, drawn: SampledTokens, end: int) -> dict[str, Any]:
        """Those up to `end` that were not told yet."""
        part = SampledTokens(**drawn.lists(self._told, end))
        self._told = max(self._told, end)
        return told_of_tokens(part, None if self._logprobs is None else self._logprobs.of(part))

    def _said(self, text: str) -> dict[str, Any]:
        return {"content": text} if self._answers.chat else {"text": text}

    def _chunk(self, said: dict[str, Any], told: dict[str, Any] | None = None) -> dict[str, Any]:
        spoken = {"delta": said} if self._answers.chat else said
        return {"choices": [{"index": self._index, **spoken, "finish_reason": None, "logprobs": None, **(told or {})}]}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, allow_nan=False).encode() + b"\n\n"
