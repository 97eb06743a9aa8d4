"""Anthropic's own client against a live engine: messages, streams, tools, stop sequences, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from tests.clients.harness import Served

HELLO: Any = [{"role": "user", "content": "Count to three"}]
GREEDY: Any = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rom"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "weather", "input_schema": CITY}]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(served: Served, anthropic_client: anthropic.Anthropic) -> None:
    message = anthropic_client.messages.create(messages=HELLO, system="Be brief", **GREEDY)
    chat = [{"role": "system", "content": "Be brief"}, *HELLO]
    same = served.post("chat/completions", messages=chat, model="tiny", max_tokens=12, temperature=0).json()
    assert text_of(message) == same["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.input_tokens == same["usage"]["prompt_tokens"]
    assert message.usage.output_tokens == 12
    blocks: Any = [{"type": "text", "text": "Be brief"}]
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Count to three"}]}]
    assert text_of(anthropic_client.messages.create(messages=parts, system=blocks, **GREEDY)) == text_of(message)
    counted = anthropic_client.messages.count_tokens(messages=HELLO, system="Be brief", model="tiny")
    assert counted.input_tokens == message.usage.input_tokens


def test_streams_sync_and_async(served: Served, anthropic_client: anthropic.Anthropic) -> None:
    whole = anthropic_client.messages.create(messages=HELLO, **GREEDY)
    with anthropic_client.messages.stream(messages=HELLO, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens

    async def streamed() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=f"{served.url}/openai", api_key="k", max_retries=0) as client,
            client.messages.stream(messages=HELLO, **GREEDY) as stream,
        ):
            return "".join([piece async for piece in stream.text_stream])

    assert asyncio.run(streamed()) == text


def test_the_events_of_a_stream_are_in_order(anthropic_client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in anthropic_client.messages.create(messages=HELLO, stream=True, **GREEDY)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_stop_sequences(anthropic_client: anthropic.Anthropic) -> None:
    whole = text_of(anthropic_client.messages.create(messages=HELLO, **GREEDY))
    stop = whole[3:5]
    message = anthropic_client.messages.create(messages=HELLO, stop_sequences=[stop], **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == whole[: whole.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools(anthropic_client: anthropic.Anthropic, choice: Any) -> None:
    asked: Any = {
        **GREEDY,
        "max_tokens": 80,
        "tools": TOOLS,
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    message = anthropic_client.messages.create(messages=HELLO, **asked)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert (call.name, call.input["city"] in ("Bern", "Rom")) == ("weather", True)
    with anthropic_client.messages.stream(messages=HELLO, **asked) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content if block.type == "tool_use"] == [call.input]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history: Any = [
        *HELLO,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
        {"role": "user", "content": [result]},
    ]
    after = anthropic_client.messages.create(messages=history, tools=TOOLS, **GREEDY)
    assert after.usage.input_tokens > 100


def test_json_by_schema(anthropic_client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": CITY}}
    message = anthropic_client.messages.create(messages=HELLO, output_config=form, **{**GREEDY, "max_tokens": 64})
    assert message.stop_reason == "end_turn"
    assert json.loads(text_of(message))["city"] in ("Bern", "Rom")


def test_refusals_are_the_errors_of_the_client(served: Served, anthropic_client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"top_p is 1\.5; it must be a number from 0 to 1") as refused:
        anthropic_client.messages.create(messages=HELLO, **{**GREEDY, "extra_body": {"top_p": 1.5}})
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(anthropic.BadRequestError, match="'x' is not served here"):
        anthropic_client.messages.create(messages=HELLO, **{**GREEDY, "model": "x"})
    used = len(served.core.model.tokenizer.encode_chat(HELLO))
    fits = f"max_tokens is 4096; .* from 1 to 512, the context; beside the prompt's {used} tokens {512 - used} fit"
    with pytest.raises(anthropic.BadRequestError, match=fits):
        anthropic_client.messages.create(messages=HELLO, model="tiny", max_tokens=4096)
    missing = served.post("messages", messages=HELLO)
    assert missing.status_code == 400
    assert json.loads(missing.content)["error"]["message"].startswith("max_tokens is missing")
