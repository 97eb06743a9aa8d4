"""Grammars over the real SmolLM2 vocabulary: which tokens may come next, where the end may come, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from upweight.errors import RequestError
from upweight.inference.constraints import WHITESPACE, GrammarError, Grammars
from upweight.inference.types import TokenConstraint
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.tool_calls import ToolStyle, call_grammar, take_apart

TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[1] / "data" / "smollm2")
SIZE = TOKENIZER.vocab_size + 13  # an output layer with rows that have no token
GRAMMARS = Grammars(TOKENIZER, SIZE)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def open_to(walk: TokenConstraint) -> set[int]:
    mask = walk.allowed()
    assert mask is not None
    assert len(mask) == (SIZE + 7) // 8
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> (i % 8) & 1}


def follow(walk: TokenConstraint, text: str) -> None:
    for token in TOKENIZER.encode(text):
        assert token in open_to(walk), TOKENIZER.token_text(token)
        walk.accept(token)


def person() -> TokenConstraint:
    return GRAMMARS.json_schema(PERSON, field="response_format")()


def test_the_end_is_open_only_where_the_json_is_complete() -> None:
    walk = person()
    text = '{"name": "Zoë", "age": 31}'
    for token in TOKENIZER.encode(text):
        assert 2 not in open_to(walk)
        walk.accept(token)
    assert open_to(walk) == {2}  # <|im_end|>, and nothing beside it


def test_what_the_schema_forbids_is_closed() -> None:
    walk = person()
    assert {TOKENIZER.token_text(i) for i in open_to(walk)} == {"{", '{"'}
    follow(walk, '{"name": "A", "age": ')
    allowed = {TOKENIZER.token_text(i) or "" for i in open_to(walk)}
    assert "7" in allowed
    assert not any("a" in text for text in allowed)


def test_answers_walk_apart() -> None:
    make = GRAMMARS.json_schema(PERSON, field="response_format")
    first, second = make(), make()
    follow(first, '{"name"')
    follow(second, '{"name": "B"')
    assert open_to(first) != open_to(second)


def test_a_token_that_was_closed_is_an_error_of_that_answer_alone() -> None:
    make = GRAMMARS.json_schema(PERSON, field="response_format")
    broken = make()
    with pytest.raises(GrammarError, match="the grammar became too complex or was left"):
        broken.accept(TOKENIZER.encode("x")[0])
    follow(make(), '{"name"')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "foo"}, "foo"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ([], "object"),
        ({"$ref": "#"}, "NoExtension"),
        ({"enum": [f"value number {i}" for i in range(100_000)]}, "too big"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        GRAMMARS.json_schema(schema, field="response_format")
    assert refused.value.field == "response_format"
    assert "\n" not in str(refused.value)


def test_grammars_may_mix_text_and_json() -> None:
    lark = 'start: "<tool_call>" one "</tool_call>"\none: %json ' + json.dumps(PERSON)
    walk = GRAMMARS.grammar(lark, field="tools")()
    follow(walk, '<tool_call>{"name": "A", "age": 1}</tool_call>')
    assert open_to(walk) == {2}


FUNCTIONS = {"f": PERSON, 'quote"d': {"$ref": "#/$defs/p", "$defs": {"p": PERSON}}}
ARGUMENTS = '{"name": "A", "age": 1}'


@pytest.mark.parametrize(
    ("style", "answer"),
    [
        (ToolStyle.HERMES, f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'),
        (ToolStyle.HERMES, f'<tool_call>\n{{"name": "quote\\"d", "arguments": {ARGUMENTS}}}\n</tool_call>'),
        (ToolStyle.LLAMA, f'{{"name": "f", "parameters": {ARGUMENTS}}}'),
        (ToolStyle.MISTRAL, f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}]'),
    ],
)
def test_demanded_calls_of_each_style_can_be_read_again(style: ToolStyle, answer: str) -> None:
    for several in (False, True):
        lark = call_grammar(style, FUNCTIONS, several=several, marker_id=None, space=WHITESPACE)
        walk = GRAMMARS.grammar(lark, field="tools")()
        follow(walk, answer)
        assert 2 in open_to(walk)
        assert (open_to(walk) == {2}) is (not several or style is not ToolStyle.HERMES)
    (call,) = take_apart(answer, style, FUNCTIONS).calls
    assert json.loads(call.arguments) == {"name": "A", "age": 1}


def test_a_call_may_begin_with_a_special_token() -> None:
    lark = call_grammar(ToolStyle.MISTRAL, FUNCTIONS, several=True, marker_id=5, space=WHITESPACE)
    walk = GRAMMARS.grammar(lark, field="tools")()
    assert open_to(walk) == {5}
    walk.accept(5)
    call = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
    follow(walk, f"[{call}, {call}]")
    assert open_to(walk) == {2}
