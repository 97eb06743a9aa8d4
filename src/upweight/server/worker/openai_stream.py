"""Answers as server-sent events: text pieces as they become final, then one closing chunk per choice with ids and log-probs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from upweight.inference.engine import Engine
from upweight.inference.types import GenerationOutput
from upweight.server.worker.openai_answers import failure, first_version, logprobs, new_id, usage
from upweight.server.worker.openai_requests import Asked

_Item = tuple[int, str | GenerationOutput]


async def stream_events(engine: Engine, kind: str, model: str, asked: Asked) -> AsyncIterator[bytes]:
    """Cancelling the iterator (the client went away) frees the rows."""
    chat = kind == "chat.completion"
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[_Item] = asyncio.Queue()

    def put(index: int) -> Callable[[Any], None]:
        def hand_over(item: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, (index, item))

        return hand_over

    base = {
        "id": new_id(chat),
        "object": "chat.completion.chunk" if chat else kind,
        "created": int(time.time()),
        "model": model,
    }
    ids: list[int] = []
    outputs: list[GenerationOutput] = []
    try:
        for prompt in asked.prompts:
            for params in asked.params:
                index = len(ids)
                ids.append(engine.submit(prompt, params, put(index), on_text=put(index)))
        if chat:
            for index in range(len(ids)):
                yield _event({**base, "choices": [_piece(index, {"role": "assistant", "content": ""})]})
        while len(outputs) < len(ids):
            index, item = await queue.get()
            if isinstance(item, str):
                entry = _piece(index, {"content": item}) if chat else _text_piece(index, item)
                yield _event({**base, "choices": [entry]})
                continue
            outputs.append(item)
            if problem := failure(item):
                yield _event({"error": {"message": problem[1], "type": "server_error", "param": None, "code": None}})
                return
            yield _event({**base, **_closing(chat, index, asked, item)})
        if asked.usage_in_stream:
            yield _event({**base, "choices": [], "usage": usage(asked, outputs)})
        yield b"data: [DONE]\n\n"
    finally:
        for request_id in ids:
            engine.cancel(request_id)


def _closing(chat: bool, index: int, asked: Asked, output: GenerationOutput) -> dict[str, Any]:
    entry = _piece(index, {}) if chat else _text_piece(index, "")
    entry |= {
        "finish_reason": str(output.finish_reason),
        "logprobs": logprobs(chat, output) if asked.logprobs else None,
        "token_ids": output.token_ids,
        "raw_logprobs": output.raw_logprobs,
    }
    if len(set(output.token_versions)) > 1:
        entry["token_inference_versions"] = output.token_versions
    chunk: dict[str, Any] = {"choices": [entry], "inference_version": first_version([output])}
    if asked.token_ids:
        chunk["prompt_token_ids"] = asked.prompts[index // len(asked.params)]
    return chunk


def _piece(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def _text_piece(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": None, "logprobs": None}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
