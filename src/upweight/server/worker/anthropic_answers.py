"""Generation outputs → Anthropic Messages, whole or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from upweight.inference.types import FinishReason, GenerationOutput, TextPiece
from upweight.server.error_bodies import anthropic_error_body
from upweight.server.worker.asked import Asked
from upweight.server.worker.running import Running
from upweight.server.worker.spoken import ContentStream, spoken
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.tool_calls import ToolCall


class Message:
    """The answer to one request."""

    def __init__(self, model: str, asked: Asked, tokenizer: Tokenizer) -> None:
        self.model = model
        self.asked = asked
        self.tokenizer = tokenizer
        self.id = f"msg_{secrets.token_hex(12)}"

    def whole(self, output: GenerationOutput) -> dict[str, Any]:
        found = spoken(self.tokenizer, self.asked.tools, output)
        blocks: list[dict[str, Any]] = [_call_block(call) for call in found.calls]
        if found.content or not blocks:
            blocks.insert(0, {"type": "text", "text": found.content})
        return {
            **self.begun(),
            "content": blocks,
            **self.stopped(output, bool(found.calls)),
            "usage": {"input_tokens": len(self.asked.prompts[0]), "output_tokens": len(output.token_ids)},
            "inference_version": output.weights_version,
        }

    def begun(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self.asked.prompts[0]), "output_tokens": 0},
        }

    def stopped(self, output: GenerationOutput, calls: bool) -> dict[str, Any]:
        """Why the answer ends, and the stop sequence if one was met."""
        if output.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        met = self._stop_met(output)
        return {"stop_reason": "end_turn" if met is None else "stop_sequence", "stop_sequence": met}

    def _stop_met(self, output: GenerationOutput) -> str | None:
        """The text of an answer ends right before the stop sequence, its tokens do not."""
        rest = self.tokenizer.decode(output.token_ids)[len(output.text) :]
        return next((stop for stop in self.asked.params[0].stop if rest.startswith(stop)), None)


async def message_events(running: Running, message: Message) -> AsyncIterator[bytes]:
    """message_start, blocks, message_delta, message_stop; or an error event after which nothing follows."""
    yield _event("message_start", message=message.begun())
    stream, blocks = ContentStream(message.asked.tools), _Blocks()
    async for _, item in running.items():
        if isinstance(item, TextPiece):
            for event in blocks.text(stream.push(item.text)):
                yield event
        elif problem := running.failure(item):
            yield _event("error", **anthropic_error_body(*problem))
        else:
            rest = stream.finish(message.tokenizer, item)
            for event in (*blocks.text(rest.content), *blocks.end(rest.calls)):
                yield event
            told = message.stopped(item, bool(rest.calls))
            yield _event("message_delta", delta=told, usage={"output_tokens": len(item.token_ids)})
            yield _event("message_stop")


class _Blocks:
    """The blocks of one stream: one with the text, begun with its first piece, then one a call."""

    def __init__(self) -> None:
        self._text_is_open = False

    def text(self, piece: str) -> Iterator[bytes]:
        if not piece:
            return
        yield from self._open_text()
        yield _block_delta(0, {"type": "text_delta", "text": piece})

    def end(self, calls: Sequence[ToolCall]) -> Iterator[bytes]:
        if not calls:
            yield from self._open_text()  # a message has one block at least
        if self._text_is_open:
            yield _event("content_block_stop", index=0)
        for index, call in enumerate(calls, int(self._text_is_open)):
            yield from _call_events(index, call)

    def _open_text(self) -> Iterator[bytes]:
        if not self._text_is_open:
            self._text_is_open = True
            yield _block_start(0, {"type": "text", "text": ""})


def _call_events(index: int, call: ToolCall) -> Iterator[bytes]:
    yield _block_start(index, {**_call_block(call), "input": {}})
    yield _block_delta(index, {"type": "input_json_delta", "partial_json": call.arguments})
    yield _event("content_block_stop", index=index)


def _call_block(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": call.name,
        "input": json.loads(call.arguments),
    }


def _block_start(index: int, block: dict[str, Any]) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _block_delta(index: int, delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", index=index, delta=delta)


def _event(kind: str, **data: Any) -> bytes:
    return (
        b"event: "
        + kind.encode()
        + b"\ndata: "
        + json.dumps({"type": kind, **data}, allow_nan=False).encode()
        + b"\n\n"
    )
