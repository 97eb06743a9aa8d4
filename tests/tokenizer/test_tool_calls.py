"""Tool calls in answers of each style, in streams, in history, and in grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upweight.tokenizer import Tokenizer
from upweight.tokenizer.chat import ChatTemplate
from upweight.tokenizer.tool_calls import Spoken, ToolCall, ToolStyle, settled, style_of, take_apart

HERMES, LLAMA, MISTRAL = ToolStyle.HERMES, ToolStyle.LLAMA, ToolStyle.MISTRAL
F = '{"name": "f", "arguments": {"x": 1}}'
G = '{"name": "g", "arguments": {"s": "a </tool_call> b"}}'
CALL_F = ToolCall("f", '{"x": 1}')
CALL_G = ToolCall("g", '{"s": "a </tool_call> b"}')
TOOL = {"type": "function", "function": {"name": "f", "description": "halves", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{F}\n</tool_call>", "", [CALL_F]),
        (HERMES, f"I look.\n<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>", "I look.", [CALL_F, CALL_G]),
        (HERMES, f"<tool_call>[{F}, {G}]</tool_call>", "", [CALL_F, CALL_G]),
        (HERMES, f"<tool_call>\n{F}", "", [CALL_F]),  # the tag left unclosed at the end
        (HERMES, f'<tool_call>{{"name": "f", "arguments": {json.dumps(json.dumps({"x": 1}))}}}</tool_call>', "", [CALL_F]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [ToolCall("f", "{}")]),
        (LLAMA, '{"name": "f", "parameters": {"x": 1}}', "", [CALL_F]),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "f", "parameters": {"x": 1}}', "", [CALL_F] * 2),
        (MISTRAL, f"[TOOL_CALLS] [{F}, {G}]", "", [CALL_F, CALL_G]),
        (MISTRAL, f"Well. [TOOL_CALLS][{F}]", "Well.", [CALL_F]),
        (MISTRAL, f"[{F}]", "", [CALL_F]),
    ],
)  # fmt: skip
def test_calls_are_found(style: ToolStyle, text: str, content: str, calls: list[ToolCall]) -> None:
    assert take_apart(text, style, {"f", "g"}) == Spoken(content, tuple(calls))
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (HERMES, '<tool_call>{"name": "h", "arguments": {}}</tool_call>'),  # not declared
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>'),
        (HERMES, f"<tool_call>{F} and more</tool_call>"),
        (HERMES, F),
        (LLAMA, 'Sure: {"name": "f", "parameters": {}}'),
        (LLAMA, '{"name": "f", "parameters": {}} and so on'),
        (LLAMA, "{"),
        (LLAMA, ""),
        (MISTRAL, '[TOOL_CALLS] [{"name": "h", "arguments": {}}]'),
        (MISTRAL, "[1, 2]"),
    ],
)
def test_what_is_no_call_stays_text(style: ToolStyle, text: str) -> None:
    assert take_apart(text, style, {"f", "g"}) == Spoken(text)


PIECES = ["a", " ", "\n", "<", "<tool", "<tool_call>", "</tool_call>", "[", "[TOOL_CALLS]", "]", "{", "}", F, G, ";", "<|python_tag|>"]  # fmt: skip


@given(st.sampled_from(list(ToolStyle)), st.lists(st.sampled_from(PIECES), max_size=7))
def test_what_a_stream_has_sent_is_how_the_content_begins(style: ToolStyle, pieces: list[str]) -> None:
    text, sent = "", ""
    for char in "".join(pieces):
        text += char
        now = text[: settled(text, style)]
        assert now.startswith(sent) or len(now) < len(sent)
        sent = max(sent, now, key=len)
    spoken = take_apart(text, style, {"f", "g"})
    assert spoken.content.startswith(sent)
    assert spoken.calls or spoken.content == text


def test_styles_are_told_by_the_template() -> None:
    assert style_of("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert style_of("{% if tools %}<|python_tag|>{% endif %}") is LLAMA
    assert style_of("{% if tools %}[TOOL_CALLS]{% endif %}") is MISTRAL
    assert style_of("{{ messages }}") is HERMES
    assert style_of(None) is HERMES


def test_tools_and_their_history_reach_a_template_that_knows_none() -> None:
    tokenizer = Tokenizer.from_folder(Path(__file__).parents[1] / "data" / "smollm2")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 8}'}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Halve 8"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    text = tokenizer.render(history, tools=[TOOL])
    assert '"description": "halves"' in text
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 8}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>" in text
    assert '{"x": 8}' in tokenizer.render(history, keep_calls=True)
    assert '{"x": 8}' not in tokenizer.render(history)  # to the letter of the template, which drops it


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    template = ChatTemplate("{{ tools | length }}{{ messages[1].role }}{{ messages[1].content }}", {})
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "4"}]
    assert template.render(messages, tools=[TOOL], add_generation_prompt=False) == "1tool4"
