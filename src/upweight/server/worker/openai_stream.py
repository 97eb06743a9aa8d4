"""OpenAI answers as server-sent events: text as it becomes final, then one closing chunk a choice with ids and log-probs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from upweight.inference.types import GenerationOutput
from upweight.server.error_bodies import error_body
from upweight.server.worker.openai_answers import OpenAIAnswers, called, first_version, usage
from upweight.server.worker.running import Running
from upweight.server.worker.spoken import ContentStream


async def stream_events(running: Running, answers: OpenAIAnswers) -> AsyncIterator[bytes]:
    """Each event ends with an empty line; the last one is `[DONE]`, or an error after which nothing follows."""
    asked = running.asked
    base = {**answers.base, "object": "chat.completion.chunk"} if answers.chat else answers.base
    streams = [ContentStream(asked.tools) for _ in asked.params]
    outputs: list[GenerationOutput] = []
    for index in range(len(streams)):
        if opening := _opening(answers, index):
            yield _event({**base, "choices": [opening]})
    async for index, item in running.items():
        if isinstance(item, str):
            if piece := streams[index].push(item):
                yield _event({**base, "choices": [_piece(answers, index, piece)]})
            continue
        if problem := running.failure(item):
            yield _event(error_body(*problem))
            return
        outputs.append(item)
        for chunk in _ending(answers, index, streams[index], item):
            yield _event({**base, **chunk})
    if asked.usage_in_stream:
        yield _event({**base, "choices": [], "usage": usage(asked, outputs)})
    yield b"data: [DONE]\n\n"


def _opening(answers: OpenAIAnswers, index: int) -> dict[str, Any] | None:
    if answers.chat:
        return _delta(index, {"role": "assistant", "content": ""})
    echoed = answers.echoed(index)
    return _piece(answers, index, echoed) if echoed else None


def _ending(
    answers: OpenAIAnswers, index: int, stream: ContentStream, output: GenerationOutput
) -> Iterator[dict[str, Any]]:
    rest = stream.finish(answers.tokenizer, output)
    if rest.content:
        yield {"choices": [_piece(answers, index, rest.content)]}
    tools = answers.asked.tools
    if rest.calls and tools is not None:
        calls = [{"index": i, **called(call, tools)} for i, call in enumerate(rest.calls)]
        yield {"choices": [_delta(index, {"tool_calls": calls})]}
    closing = _delta(index, {}) if answers.chat else _piece(answers, index, "")
    closing |= answers.details(index, output, bool(rest.calls))
    chunk = {"choices": [closing], "inference_version": first_version([output])}
    yield {**chunk, **answers.of_prompt(index, output)}


def _piece(answers: OpenAIAnswers, index: int, text: str) -> dict[str, Any]:
    if answers.chat:
        return _delta(index, {"content": text})
    return {"index": index, "text": text, "finish_reason": None, "logprobs": None}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, allow_nan=False).encode() + b"\n\n"
