from typing import Any

import pytest

from upweight.errors import RequestError, UnsupportedModel
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.chat import ChatTemplate

USER = {"role": "user", "content": "hi"}


def rendered(source: str, messages: Any = (USER,), *, tools: Any = None) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, tools=tools, add_generation_prompt=True)


def test_text_parts_are_joined(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert tokenizer.render([{"role": "user", "content": parts}]) == tokenizer.render([USER])


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "critic", "content": "x"}, "role is 'critic'"),
        ({"content": "x"}, "role is None"),
        ({"role": ["user"], "content": "x"}, "role is"),
        ({"role": "user"}, "content must be text"),
        ({"role": "user", "content": 3}, "content must be text"),
        ({"role": "user", "content": b"x"}, "content must be text"),
        ({"role": "assistant", "content": None}, "content must be text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url'"),
        ({"role": "user", "content": [3]}, "'int'"),
        ("hi", "must be an object"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "needs a function"),
        ({"role": "assistant", "content": "", "tool_calls": 3}, "tool_calls must be a list"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments of the call of f",
        ),
    ],
)
def test_bad_messages_are_named(tokenizer: Tokenizer, message: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]") as caught:
        tokenizer.render([USER, message])
    assert problem in str(caught.value)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, None])
def test_messages_must_be_a_list(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestError, match="must be a list"):
        tokenizer.render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + None }}",
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_template_errors_are_request_errors(source: str) -> None:
    with pytest.raises(RequestError, match="template") as caught:
        rendered(source)
    assert caught.value.field == "messages"


def test_the_reason_of_the_template_is_shown() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_does_not_parse() -> None:
    with pytest.raises(UnsupportedModel, match="line 1"):
        ChatTemplate("{% if %}", {})


def test_helpers_of_hugging_face_templates() -> None:
    assert rendered("{{ bos_token }}{{ tools | tojson }}", tools=[{"name": "<f>"}]) == '<s>[{"name": "<f>"}]'
    assert rendered("{{ strftime_now('%Y') }}").startswith("2")
    assert rendered("{% generation %}x{% endgeneration %}y") == "xy"
    assert rendered("{% for m in messages %}\n  {% break %}\n{% endfor %}\nz") == "z"
    assert rendered("{{ tools is none }}") == "True"


def test_call_arguments_reach_the_template_as_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert rendered("{{ messages[0].tool_calls[0].function.arguments.x }}{{ messages[0].content }}", messages) == "1"
    assert call["function"]["arguments"] == '{"x": 1}', "the caller's message is left alone"


def test_no_template(folder_tokenizer: Tokenizer) -> None:
    from dataclasses import replace

    bare = Tokenizer(replace(folder_tokenizer._parts, chat_template=None))
    with pytest.raises(RequestError, match="no chat template"):
        bare.render([USER])
