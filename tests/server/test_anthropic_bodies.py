"""Bodies of Anthropic's Messages API: what is read from them, what is refused, what is answered."""

from __future__ import annotations

from typing import Any

import pytest
from request_makers import SERVING, TOKENIZER, WEATHER, said

from upweight.errors import RequestError
from upweight.inference.types import FinishReason
from upweight.server.worker.anthropic_answers import Message
from upweight.server.worker.anthropic_requests import count_tokens, parse_messages
from upweight.server.worker.asked import Asked
from upweight.server.worker.openai_requests import parse_chat

HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [{"name": "weather", "description": "Weather of a city", "input_schema": WEATHER}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def ask(**body: Any) -> Asked:
    return parse_messages({"messages": HELLO, "max_tokens": 9, **body}, SERVING)


def test_the_prompt_is_that_of_the_same_chat() -> None:
    chat = [{"role": "system", "content": "Be brief"}, *HELLO]
    expected = parse_chat({"messages": chat}, SERVING).prompts
    blocks = [
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}},
    ]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert ask(system="Be brief").prompts == expected
    assert ask(system=blocks, messages=parts).prompts == expected
    assert count_tokens({"messages": parts, "system": blocks}, SERVING) == len(expected[0])


def test_calls_and_results_of_the_history_reach_the_prompt() -> None:
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no city", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    text = TOKENIZER.decode(ask(messages=history, tools=TOOLS).prompts[0])
    for piece in ("Weather of a city", 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}',
                  "<tool_response>\nrain\n", "error: no city", "So?"):  # fmt: skip
        assert piece in text
    assert text.index("rain") < text.index("So?")


def test_sampling_fields_reach_the_engine() -> None:
    (params,) = ask(temperature=0, top_p=0.5, top_k=3, stop_sequences=["x"]).params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.0, 0.5, 3)
    assert params.stop == ("x",)
    assert ask(tools=TOOLS, tool_choice={"type": "any"}).params[0].constraint is not None
    assert ask(tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}).params[0].constraint is not None
    assert ask(tools=TOOLS, tool_choice={"type": "none"}).tools is None
    auto = ask(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert auto.tools is not None
    assert not auto.tools.several


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None), ("max_tokens", 0), ("max_tokens", 513), ("max_tokens", True), ("messages", []), ("messages", "Hi"),
        ("messages", [3]), ("messages", [{"role": "tool", "content": "x"}]), ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "user", "content": [{"type": "image"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]),
        ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "x"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": 3}]}]),
        ("messages", [{"role": "user", "content": "word " * 600}]),
        ("system", 3), ("system", [3]), ("system", [{"type": "image"}]), ("stop_sequences", "x" * 0), ("stop_sequences", [""]),
        ("temperature", "hot"), ("temperature", -1), ("top_p", 2), ("top_k", -5), ("stream", "yes"),
        ("tools", "x"), ("tools", [{"name": "f"}]), ("tools", [{"name": "a b", "input_schema": {}}]), ("tools", [{"type": "bash_20250124", "name": "bash"}]),
        ("tool_choice", "any"), ("tool_choice", {"type": "any"}), ("tool_choice", {"type": "maybe"}), ("tool_choice", {"type": "tool", "name": "f"}),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}), ("colour", "red"),
        ("output_config", {"effort": "low"}), ("output_config", {"format": {"type": "xml"}}), ("output_config", 3),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        ask(**{field: value})
    assert (refused.value.field or "").partition(".")[0] == field
    assert field in str(refused.value)


def message(asked: Asked, text: str, **more: Any) -> dict[str, Any]:
    return Message("m", asked, TOKENIZER).whole(said(text, **more))


def test_answers_have_the_shape_of_the_public_api() -> None:
    asked = ask()
    body = message(asked, "Hello")
    tokens = len(TOKENIZER.encode("Hello")) + 1
    assert body["content"] == [{"type": "text", "text": "Hello"}]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "m")
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"] == {"input_tokens": len(asked.prompts[0]), "output_tokens": tokens}
    assert message(asked, "Hello", finish_reason=FinishReason.LENGTH)["stop_reason"] == "max_tokens"


def test_the_stop_sequence_that_was_met_is_told() -> None:
    asked = ask(stop_sequences=["lo", "l"])
    body = message(asked, "Hel", token_ids=TOKENIZER.encode("Hello"))
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "lo")
    assert message(asked, "He")["stop_reason"] == "end_turn"


def test_calls_are_blocks() -> None:
    body = message(ask(tools=TOOLS), f"I look.\n{CALL}")
    text, call = body["content"]
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Bern"})
    assert body["stop_reason"] == "tool_use"
    assert [block["type"] for block in message(ask(tools=TOOLS), CALL)["content"]] == ["tool_use"]
