"""Calls of models whose marker is a special token, which text leaves out; whole and in streams."""

from __future__ import annotations

import dataclasses

import pytest
import tokenizers
from request_makers import MESSAGES, SERVING, TOKENIZER, TOOLS

from upweight.inference.constraints import Grammars
from upweight.inference.types import FinishReason, GenerationOutput
from upweight.server.worker.asked import Serving, ToolUse
from upweight.server.worker.openai_requests import parse_chat
from upweight.server.worker.spoken import ContentStream, new_call_id, spoken
from upweight.tokenizer import TextStream, Tokenizer
from upweight.tokenizer.tool_calls import Spoken, ToolCall, ToolStyle

MARKER = "[TOOL_CALLS]"
LIST = ' [{"name": "weather", "arguments": {"city": "Bern"}}]'
CALL = ToolCall("weather", '{"city": "Bern"}')


@pytest.fixture(scope="module")
def mistral() -> Serving:
    """SmolLM2's vocabulary with the marker as a special token, and a template that knows it."""
    parts = TOKENIZER._parts
    core = tokenizers.Tokenizer.from_str(parts.core.to_str())
    core.add_special_tokens([tokenizers.AddedToken(MARKER, special=True)])
    template = "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}{{ messages[0].content }}"
    tokenizer = Tokenizer(dataclasses.replace(parts, core=core, chat_template=template, tool_template=None))
    size = tokenizer.vocab_size
    return dataclasses.replace(SERVING, tokenizer=tokenizer, vocab_size=size, grammars=Grammars(tokenizer, size))


def said(tokenizer: Tokenizer, text: str) -> GenerationOutput:
    ids = [*tokenizer.encode(text), 2]
    return GenerationOutput(token_ids=ids, text=tokenizer.decode(ids), finish_reason=FinishReason.STOP)


def streamed(tokenizer: Tokenizer, tools: ToolUse, output: GenerationOutput) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls as a stream tells them, token by token."""
    text, content = TextStream(tokenizer), ContentStream(tools)
    sent = "".join(content.push(text.push(token)) for token in output.token_ids)
    rest = content.finish(tokenizer, output)
    return sent + rest.content, rest.calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (MARKER + LIST, "", (CALL,)),
        (LIST, "", (CALL,)),
        ("Just words.", "Just words.", ()),
        ("[1, 2] is a list", "[1, 2] is a list", ()),
        (f"{MARKER} [nonsense", " [nonsense", ()),
    ],
)
def test_calls_behind_a_special_marker(mistral: Serving, text: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    tools = ToolUse(names=frozenset({"weather"}), style=mistral.tokenizer.tool_style)
    assert tools.style is ToolStyle.MISTRAL
    output = said(mistral.tokenizer, text)
    assert MARKER not in output.text
    assert spoken(mistral.tokenizer, tools, output) == Spoken(content, calls)
    assert streamed(mistral.tokenizer, tools, output) == (content, calls)


def test_a_call_behind_content_is_found(mistral: Serving) -> None:
    tools = ToolUse(names=frozenset({"weather"}), style=ToolStyle.MISTRAL)
    output = said(mistral.tokenizer, f"I look.{MARKER}{LIST}")
    assert spoken(mistral.tokenizer, tools, output) == Spoken("I look.", (CALL,))
    assert streamed(mistral.tokenizer, tools, output) == ("I look.", (CALL,))


def test_a_demanded_call_begins_with_the_special_marker(mistral: Serving) -> None:
    asked = parse_chat({"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}, mistral)
    make = asked.params[0].constraint
    assert make is not None
    walk, marker = make(), mistral.tokenizer.vocab_size - 1
    mask = walk.allowed() or b""
    assert [i for i in range(8 * len(mask)) if mask[i // 8] >> (i % 8) & 1] == [marker]


def test_ids_of_calls_suit_the_templates() -> None:
    assert len(new_call_id(ToolStyle.MISTRAL)) == 9
    assert new_call_id(ToolStyle.HERMES) != new_call_id(ToolStyle.HERMES)
