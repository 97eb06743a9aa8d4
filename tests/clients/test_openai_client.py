"""OpenAI's own client against a live engine: chat, text, streams, tools, JSON, log-probs, errors."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.clients.harness import Served

MESSAGES: Any = [{"role": "user", "content": "Count to three"}]
GREEDY: Any = {"model": "tiny", "max_tokens": 12, "temperature": 0}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rom"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


def ids_of(choice: Any) -> list[int]:
    found: list[int] = choice.model_extra["token_ids"]
    return found


def test_chat(served: Served, openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(messages=MESSAGES, **GREEDY)
    (choice,) = answer.choices
    tokenizer = served.core.model.tokenizer
    assert choice.message.content == tokenizer.decode(ids_of(choice))
    assert (choice.finish_reason, len(ids_of(choice)), answer.model) == ("length", 12, "tiny")
    prompt = len(tokenizer.encode_chat(MESSAGES))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 12)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Count "}, {"type": "text", "text": "to three"}]}]
    again = openai_client.chat.completions.create(messages=parts, **GREEDY)  # type: ignore[arg-type]
    assert again.choices[0].message.content == choice.message.content


def test_an_async_client_and_many_requests_at_once(served: Served, openai_client: openai.OpenAI) -> None:
    alone = openai_client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content

    async def many() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/openai/v1", api_key="k", max_retries=0) as client:
            calls = [client.chat.completions.create(messages=MESSAGES, **GREEDY) for _ in range(8)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(many()) == [alone] * 8


def test_a_stream_is_the_whole_answer(openai_client: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2}
    asked |= {"temperature": 1, "seed": 5}
    whole = openai_client.chat.completions.create(**asked)
    texts, ids, entries, reasons = ["", ""], [[], []], [[], []], [None, None]  # type: ignore[var-annotated]
    usage = None
    for chunk in openai_client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += (choice.model_extra or {}).get("token_ids") or []
            entries[choice.index] += choice.logprobs.content or [] if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]  # type: ignore[call-overload]
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert ids[choice.index] == ids_of(choice)
        assert choice.logprobs is not None
        assert entries[choice.index] == choice.logprobs.content
        assert reasons[choice.index] == choice.finish_reason
    assert usage is not None
    assert usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )  # type: ignore[union-attr]


def test_an_async_stream_and_the_stream_helper(served: Served, openai_client: openai.OpenAI) -> None:
    whole = openai_client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content

    async def streamed() -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/openai/v1", api_key="k", max_retries=0) as client:
            chunks = await client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(streamed()) == whole
    with openai_client.chat.completions.stream(messages=MESSAGES, **GREEDY) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == whole
    told: Any = {**GREEDY, "messages": MESSAGES, "logprobs": True, "temperature": 1, "seed": 5}
    entries = openai_client.chat.completions.create(**told).choices[0].logprobs
    with openai_client.chat.completions.stream(**told) as stream:
        for _ in stream:
            final = stream.current_completion_snapshot.choices[0].logprobs
    assert final is not None
    assert entries is not None
    assert final.content == entries.content


def test_text_completions_of_every_prompt(served: Served, openai_client: openai.OpenAI) -> None:
    ids = served.core.model.tokenizer.encode("One two")
    for prompt, count in (("One two", 1), (ids, 1), (["One two", "One"], 2), ([ids, [5]], 2)):
        answer = openai_client.completions.create(prompt=prompt, n=2, **GREEDY)  # type: ignore[arg-type]
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        assert answer.choices[0].text == answer.choices[1].text
    streamed = openai_client.completions.create(prompt="One two", stream=True, echo=True, **GREEDY)
    whole = openai_client.completions.create(prompt="One two", echo=True, **GREEDY).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == whole
    assert whole.startswith("One two")


def test_top_log_probs_agree_with_the_drawn_token(openai_client: openai.OpenAI) -> None:
    for temperature in (0.0, 0.7):
        asked: Any = {**GREEDY, "temperature": temperature, "logprobs": True, "top_logprobs": 5, "seed": 3}
        content = openai_client.chat.completions.create(messages=MESSAGES, **asked).choices[0].logprobs.content  # type: ignore[union-attr]
        assert content
        for entry in content:
            values = [other.logprob for other in entry.top_logprobs]
            assert len(values) == 5
            assert values == sorted(values, reverse=True)
            same = [other.logprob for other in entry.top_logprobs if other.bytes == entry.bytes]
            assert all(math.isclose(value, entry.logprob, abs_tol=1e-5) for value in same)
            assert same or entry.logprob <= values[-1] + 1e-6
            if temperature == 0:
                assert entry.top_logprobs[0].token == entry.token


def test_echo_with_log_probs_scores_the_prompt(openai_client: openai.OpenAI) -> None:
    told = openai_client.completions.create(
        prompt="One two three", echo=True, logprobs=0, **{**GREEDY, "max_tokens": 1}
    )
    logprobs = told.choices[0].logprobs
    assert logprobs is not None
    values = logprobs.token_logprobs or []
    assert len(values) == len(logprobs.tokens or []) == told.usage.total_tokens  # type: ignore[union-attr]
    assert values[0] is None
    assert all(value is not None and value < 0 for value in values[1:])
    only = openai_client.completions.create(
        prompt="One two three", echo=True, logprobs=0, **{**GREEDY, "max_tokens": 0}
    )
    assert only.choices[0].text == "One two three"
    assert (only.choices[0].logprobs.token_logprobs or [])[1:] == pytest.approx(values[1:-1], abs=1e-5)  # type: ignore[union-attr]


def test_seeds_make_choices_that_differ_and_come_again(openai_client: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "messages": MESSAGES, "temperature": 1.0, "n": 3, "seed": 11}
    first, second = (openai_client.chat.completions.create(**asked) for _ in range(2))
    texts = [tuple(ids_of(choice)) for choice in first.choices]
    assert [tuple(ids_of(choice)) for choice in second.choices] == texts
    assert len(set(texts)) == 3
    later = openai_client.chat.completions.create(**{**asked, "n": 1, "seed": 12})
    assert tuple(ids_of(later.choices[0])) == texts[1]


def test_logit_bias_decides(openai_client: openai.OpenAI) -> None:
    for token, expected in (("5000", [5000] * 3), ("2", [2])):
        asked: Any = {**GREEDY, "max_tokens": 3, "logit_bias": {token: 100}}
        choice = openai_client.chat.completions.create(messages=MESSAGES, **asked).choices[0]
        assert ids_of(choice) == expected
    banned = openai_client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0]
    first = ids_of(banned)[0]
    other = openai_client.chat.completions.create(messages=MESSAGES, logit_bias={str(first): -100}, **GREEDY)
    assert first not in ids_of(other.choices[0])


def test_min_tokens_and_stop_ids(openai_client: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "logit_bias": {"2": 100}, "extra_body": {"min_tokens": 4}}
    choice = openai_client.chat.completions.create(messages=MESSAGES, **asked).choices[0]
    assert len(ids_of(choice)) == 5
    assert (ids_of(choice)[-1], choice.finish_reason) == (2, "stop")


def test_json_by_schema(openai_client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for temperature in (0.0, 1.0):
        asked: Any = {**GREEDY, "temperature": temperature, "max_tokens": 64, "seed": 1, "response_format": form}
        choice = openai_client.chat.completions.create(messages=MESSAGES, **asked).choices[0]
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content or "")["city"] in ("Bern", "Rom")
    cut = openai_client.chat.completions.create(messages=MESSAGES, response_format=form, **{**GREEDY, "max_tokens": 2})
    assert cut.choices[0].finish_reason == "length"
    assert (cut.choices[0].message.content or "").startswith("{")


class City(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Bern", "Rom"]


def test_json_by_pydantic_model(openai_client: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "max_tokens": 64}
    parsed = openai_client.chat.completions.parse(messages=MESSAGES, response_format=City, **asked)
    assert isinstance(parsed.choices[0].message.parsed, City)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_demanded_tool_calls(openai_client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {**GREEDY, "max_tokens": 80, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    told = openai_client.chat.completions.create(messages=MESSAGES, **asked).choices[0]
    assert (told.finish_reason, told.message.content) == ("tool_calls", None)
    (call,) = told.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Rom")
    name, arguments, reason = "", "", None
    for chunk in openai_client.chat.completions.create(messages=MESSAGES, stream=True, **asked):
        delta = chunk.choices[0].delta
        assert not delta.content
        reason = chunk.choices[0].finish_reason or reason
        for part in delta.tool_calls or []:
            assert part.function is not None
            name, arguments = name + (part.function.name or ""), arguments + (part.function.arguments or "")
    assert (name, json.loads(arguments), reason) == ("weather", json.loads(call.function.arguments), "tool_calls")
    history: Any = [
        *MESSAGES,
        told.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    after = openai_client.chat.completions.create(messages=history, tools=TOOLS, **GREEDY)
    assert after.usage.prompt_tokens > 100  # type: ignore[union-attr]


def test_refusals_are_the_errors_of_the_client(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"top_p is 1\.5; it must be a number from 0 to 1") as refused:
        openai_client.chat.completions.create(messages=MESSAGES, **{**GREEDY, "top_p": 1.5})
    assert (refused.value.param, refused.value.type) == ("top_p", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match=r"max_tokens is 4096; .* beside the prompt's \d+ tokens \d+ fit"):
        openai_client.chat.completions.create(messages=MESSAGES, **{**GREEDY, "max_tokens": 4096})
    with pytest.raises(openai.BadRequestError, match="model 'x' is not served here; served: tiny, ftjob-1"):
        openai_client.chat.completions.create(messages=MESSAGES, **{**GREEDY, "model": "x"})
    with pytest.raises(openai.BadRequestError, match=r"prompt is \[\]"):
        openai_client.completions.create(prompt=[], **GREEDY)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match=r"messages too long: .* at most 511 fit"):
        openai_client.chat.completions.create(
            messages=[{"role": "user", "content": "a b " * 600}], stream=True, **GREEDY
        )
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}
    with pytest.raises(openai.BadRequestError, match="response_format cannot be used for constrained decoding"):
        openai_client.chat.completions.create(messages=MESSAGES, response_format=form, **GREEDY)


def test_models(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["tiny", "ftjob-1"]
    assert openai_client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("x")
