"""Bodies of OpenAI requests: what is read from them, and that whatever a field holds, the refusal names field, value and limit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from request_makers import MESSAGES, SERVING, TOKENIZER, TOOLS

from upweight.errors import RequestError
from upweight.server.worker.asked import Asked
from upweight.server.worker.fields import is_deeper
from upweight.server.worker.openai_requests import parse_chat, parse_text
from upweight.tokenizer.tool_calls import ToolStyle

NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**5000
NO_NUMBER = ["1", True, [], {}, NAN, INFINITE, HUGE]
WRONG: list[tuple[str, list[Any]]] = [
    ("n", [*NO_NUMBER, 0, 129, 1.0]),
    ("max_tokens", [*NO_NUMBER, -1, 1.5, 513]),
    ("temperature", [*NO_NUMBER, -0.1, 101, 1e-9]),
    ("top_p", [*NO_NUMBER, -0.1, 1.1]),
    ("top_k", [*NO_NUMBER, 1.5, -2, 2**31]),
    ("min_p", [*NO_NUMBER, -0.1, 1.1]),
    ("min_tokens", [*NO_NUMBER, -1, 8, 513]),
    ("seed", [*NO_NUMBER, 1.5, 2**64, -(2**63) - 1]),
    ("presence_penalty", [*NO_NUMBER, -2.1, 2.1]),
    ("frequency_penalty", [*NO_NUMBER, -2.1, 2.1]),
    ("repetition_penalty", [*NO_NUMBER, 0, -1, 101]),
    ("rep_window", [*NO_NUMBER, -1, 0.5]),
    ("logit_bias", ["x", [1], {"x": 1}, {"-1": 1}, {"49152": 1}, {"1": 101}, {"1": "1"}, {"1": NAN}, {"²": 1}, {"9" * 5000: 1}, {"1": HUGE}]),
    ("stop", ["", [""], [1], {}, 0, False, ["a"] * 17]),
    ("stream", ["false", 1, []]),
    ("stream_options", ["x", 1, False, [], {"include_usage": "yes"}]),
    ("return_token_ids", ["yes", 1]),
    ("prompt_logprobs", [1, "yes"]),
    ("ignore_eos", ["no", 0]),
    ("stop_token_ids", ["1", 1, [True], [1.5], {}, [-1], [49152], [HUGE]]),
    ("logprobs", ["x", -1, 6, 0.5, [], {}, NAN]),
    ("timeout", [*NO_NUMBER, 0, -1, 86401]),
    ("tools", ["x", [{}]]),
    ("response_format", ["json", [], {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}},
                         {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}]),
    ("nonsense", [1]),
]  # fmt: skip
CHAT_WRONG: list[tuple[str, list[Any]]] = [
    ("messages", [None, [], [3], "x", {}]),
    ("max_completion_tokens", ["1", -1, 1.5, True, [1], {}, NAN, 513]),
    ("logprobs", [1, "true"]),
    ("top_logprobs", [1, 21, -1, "1", True]),
    ("functions", [[{}]]),
    ("modalities", [["audio"]]),
    ("best_of", [1]),
    ("echo", [True]),
    ("tool_choice", ["required", "maybe", {"type": "function"}, {"type": "function", "function": {"name": "weather"}}]),
    ("parallel_tool_calls", ["no"]),
]
TEXT_WRONG: list[tuple[str, list[Any]]] = [
    ("prompt", [None, "", [], [[]], [None], [1, "a"], [True], [[True]], [1.5], {}, 5, [49152], [-1], [HUGE], ["\ud800"]]),
    ("best_of", [0, 2, "1"]),
    ("suffix", ["x"]),
    ("echo", ["no", 1]),
    ("messages", [MESSAGES]),
]  # fmt: skip


def pairs(table: list[tuple[str, list[Any]]]) -> list[Any]:
    return [pytest.param(f, v, id=f"{f}-{i}") for f, values in table for i, v in enumerate(values)]


def chat(**body: Any) -> Asked:
    return parse_chat({"messages": MESSAGES, **body}, SERVING)


def text(**body: Any) -> Asked:
    return parse_text({"prompt": "Hi", **body}, SERVING)


@pytest.mark.parametrize(("field", "value"), pairs([*WRONG, *CHAT_WRONG]))
def test_a_wrong_field_of_a_chat_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        chat(**{field: value})
    assert (refused.value.field or "").partition(".")[0] == field
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(("field", "value"), pairs([*WRONG, *TEXT_WRONG]))
def test_a_wrong_field_of_a_text_completion_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        text(**{field: value})
    assert (refused.value.field or "").partition(".")[0] == field


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"n": 129}, "n is 129; it must be a whole number from 1 to 128"),
        (
            {"max_tokens": 600},
            "max_tokens is 600; it must be a whole number from 0 to 512, the context; beside the prompt's 31 tokens 481 fit",
        ),
        ({"top_p": 1.5}, "top_p is 1.5; it must be a number from 0 to 1"),
        ({"logit_bias": {"49152": 1}}, "logit_bias names token '49152'; it must be a token id from 0 to 49151"),
        ({"top_logprobs": 2}, "top_logprobs is 2, which needs logprobs true"),
        ({"min_tokens": 8}, "min_tokens is 8; it must be at most max_tokens, which is 7"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_refusals_name_field_value_and_limit(body: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**body)
    assert str(refused.value) == line


OPTIONAL = (
    "model n max_tokens max_completion_tokens temperature top_p top_k min_p min_tokens seed stop logprobs top_logprobs stream stream_options"
    " return_token_ids presence_penalty frequency_penalty repetition_penalty logit_bias tools tool_choice response_format user"
    " metadata function_call functions modalities audio prediction reasoning_effort store service_tier parallel_tool_calls"
    " prompt_logprobs timeout stop_token_ids ignore_eos rep_window best_of echo suffix"
).split()


def test_null_is_the_same_as_left_out() -> None:
    nulls = dict.fromkeys(OPTIONAL)
    messages = [{"role": "user", "name": None, "tool_calls": None, "content": "Hi"}]
    asked = parse_chat({"messages": messages, **nulls}, SERVING)
    assert asked == chat()
    assert [(p.max_tokens, p.temperature, p.top_p, p.top_k) for p in asked.params] == [(7, 1.0, 1.0, 0)]
    assert text(**nulls) == text()


def test_every_sampling_field_reaches_the_engine() -> None:
    asked = chat(
        max_completion_tokens=30, max_tokens=9, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, min_tokens=3, seed=-1,
        stop=["x", "y"], stop_token_ids=[5], presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.3,
        rep_window=16, logit_bias={"5": -100, "7": 1.5, "9": None}, logprobs=True, top_logprobs=3, prompt_logprobs=True,
    )  # fmt: skip
    (params,) = asked.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (30, 0.5, 0.9, 40)
    assert (params.min_p, params.min_tokens, params.seed, params.stop) == (0.1, 3, 2**64 - 1, ("x", "y"))
    assert (params.stop_ids, params.presence_penalty, params.frequency_penalty) == (frozenset({5}), 0.1, 0.2)
    assert (params.repetition_penalty, params.rep_window) == (1.3, 16)
    assert params.logit_bias == ((5, -100.0), (7, 1.5))
    assert (params.top_logprobs, params.prompt_logprobs) == (3, True)
    assert (asked.logprobs, asked.prompt_logprobs) == (True, True)
    assert chat(top_k=-1).params[0].top_k == 0


def test_each_choice_has_a_stream_of_its_own() -> None:
    assert [p.seed for p in chat(n=3, seed=5).params] == [5, 6, 7]
    asked = text(prompt=["a", "b"], n=2, seed=2**64 - 2)
    assert [p.seed for p in asked.params] == [2**64 - 2, 2**64 - 1, 0, 1]
    assert [asked.prompt_of(i) for i in range(4)] == [asked.prompts[0]] * 2 + [asked.prompts[1]] * 2
    assert [p.seed for p in chat(n=2).params] == [None, None]


def test_log_probs_of_text_completions() -> None:
    def read(**body: Any) -> tuple[bool, int]:
        asked = text(**body)
        return asked.logprobs, asked.params[0].top_logprobs

    assert [read(logprobs=v) for v in (0, 1, 5, True, False)] == [
        (True, 0),
        (True, 1),
        (True, 5),
        (True, 0),
        (False, 0),
    ]
    assert read(logprobs=1, return_token_ids=True) == (True, 0)  # what rollouts send: they need no alternatives
    echoed = text(echo=True, logprobs=0)
    assert (echoed.echo, echoed.params[0].prompt_logprobs, echoed.prompt_logprobs) == (True, True, False)
    assert not text(echo=True).params[0].prompt_logprobs
    with pytest.raises(RequestError, match="logprobs is 2; it must be 0 with echo"):
        text(echo=True, logprobs=2)


def test_prompts_of_every_form() -> None:
    assert text(prompt=[1, 2]).prompts == [[1, 2]]
    assert text(prompt=[[1, 2], [3]]).prompts == [[1, 2], [3]]
    assert text(prompt=["Hi", "Ho"]).prompts == [TOKENIZER.encode("Hi"), TOKENIZER.encode("Ho")]
    assert text(best_of=2, n=2).n == 2


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match="prompt too long: 512 tokens, at most 511 fit"):
        text(prompt=[1] * 512)
    assert text(prompt=[1] * 512, max_tokens=0).prompts == [[1] * 512]  # to score, no room is needed
    long = [{"role": "user", "content": "word " * 600}]
    with pytest.raises(RequestError, match=r"messages too long: \d+ tokens, at most 511 fit") as refused:
        parse_chat({"messages": long}, SERVING)
    assert refused.value.field == "messages"


def test_tools_reach_the_prompt_and_may_be_called() -> None:
    asked = chat(tools=TOOLS)
    assert asked.tools is not None
    assert (asked.tools.names, asked.tools.style, asked.tools.several) == ({"weather", "clock"}, ToolStyle.HERMES, True)
    assert "Weather of a city" in TOKENIZER.decode(asked.prompts[0])
    assert asked.params[0].constraint is None
    assert not getattr(chat(tools=TOOLS, parallel_tool_calls=False).tools, "several", True)


def test_tool_choice_none_neither_tells_nor_calls_tools() -> None:
    asked = chat(tools=TOOLS, tool_choice="none")
    assert (asked.tools, asked.prompts) == (None, chat().prompts)
    assert chat(tools=[], tool_choice="auto") == chat()


def follows(asked: Asked, answer: str) -> bool:
    """Whether the constraint lets a model write `answer` and then end."""
    make = asked.params[0].constraint
    assert make is not None
    walk = make()
    for token in [*TOKENIZER.encode(answer), 2]:
        mask = walk.allowed() or b""
        if not mask[token // 8] >> (token % 8) & 1:
            return False
        walk.accept(token)
    return True


CITY, CLOCK = '{"name": "weather", "arguments": {"city": "Bern"}}', '{"name": "clock", "arguments": {}}'


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def test_tool_choice_required_demands_a_declared_call() -> None:
    asked = chat(tools=TOOLS, tool_choice="required")
    assert follows(asked, tagged(CITY))
    assert follows(asked, tagged(CLOCK, CITY))
    assert not follows(asked, "Bern is sunny")
    assert not follows(asked, tagged('{"name": "weather", "arguments": {"town": "Bern"}}'))
    assert not follows(asked, tagged('{"name": "stock", "arguments": {}}'))
    one = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert follows(one, tagged(CITY))
    assert not follows(one, tagged(CITY, CITY))


def test_a_named_tool_choice_demands_that_function() -> None:
    asked = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "clock"}})
    assert follows(asked, tagged(CLOCK))
    assert not follows(asked, tagged(CITY))
    with pytest.raises(
        RequestError, match="tool_choice is 'stock'; it must be the name of a declared function: weather"
    ):
        chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "stock"}})


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "a", "parameters": []}}],
        [{"type": "browser"}],
        [TOOLS[0], TOOLS[0]],
        [3],
        [TOOLS[0]] * 129,
    ],
)
def test_malformed_tools_are_refused(tools: list[Any]) -> None:
    with pytest.raises(RequestError, match="tools") as refused:
        chat(tools=tools)
    assert refused.value.field == "tools"


def test_a_tool_schema_that_cannot_be_used_is_refused_where_it_is_needed() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    assert chat(tools=tools).tools is not None
    with pytest.raises(RequestError, match="tools cannot be used for constrained decoding"):
        chat(tools=tools, tool_choice="required")


def test_response_format_is_a_grammar() -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "w", "strict": True, "schema": {"type": "array", "items": {"type": "integer"}}},
    }
    assert follows(chat(response_format=form), "[1, 2]")
    assert not follows(chat(response_format=form), '["a"]')
    assert follows(chat(response_format={"type": "json_object"}), '{"a": [1, {"b": null}]}')
    assert not follows(chat(response_format={"type": "json_object"}), "[1]")
    assert chat(response_format={"type": "text"}) == chat()
    assert follows(text(response_format=form), "[]")


@pytest.mark.parametrize("field", ["ignore_eos", "min_tokens"])
def test_a_grammar_must_be_able_to_end(field: str) -> None:
    with pytest.raises(RequestError, match=field):
        chat(response_format={"type": "json_object"}, **{field: True if field == "ignore_eos" else 3})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 600) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*OPTIONAL, "messages", "prompt", "x"]), JSON, max_size=4))
def test_any_body_is_read_or_refused_by_field(body: dict[str, Any]) -> None:
    for parse, base in ((parse_chat, {"messages": MESSAGES}), (parse_text, {"prompt": "Hi"})):
        try:
            asked = parse({**base, **body}, SERVING)
        except RequestError as error:
            refused: RequestError | None = error
        else:
            refused = None
            assert len(asked.params) == asked.n * len(asked.prompts)
        assert refused is None or refused.field


def test_nesting_is_measured() -> None:
    value: Any = {"a": [1, {"b": []}], "c": 3}
    assert [is_deeper(value, levels) for levels in (1, 2, 3, 4, 5)] == [True, True, True, False, False]
    assert not is_deeper(list(range(1000)), 1)
