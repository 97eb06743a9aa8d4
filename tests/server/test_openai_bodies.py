"""OpenAI request bodies that the worker reads, and the answers that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from upweight.errors import RequestError
from upweight.inference.types import FinishReason, GenerationOutput
from upweight.server.worker.openai_answers import answer
from upweight.server.worker.openai_requests import Asked, parse_chat, parse_text
from upweight.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(Path(__file__).parents[1] / "data" / "smollm2")


OPTIONAL = (
    "model n max_tokens max_completion_tokens temperature top_p top_k min_p seed stop logprobs top_logprobs stream stream_options"
    " return_token_ids presence_penalty frequency_penalty repetition_penalty logit_bias tools tool_choice response_format user"
    " metadata function_call functions modalities audio prediction reasoning_effort store service_tier parallel_tool_calls"
).split()


def test_null_is_the_same_as_left_out(tokenizer: Tokenizer) -> None:
    nulls = dict.fromkeys(OPTIONAL)
    messages = [{"role": "user", "name": None, "tool_calls": None, "content": "Hi"}]
    asked = parse_chat({"messages": messages, **nulls}, tokenizer, 7)
    assert asked == parse_chat({"messages": MESSAGES}, tokenizer, 7)
    assert [(p.max_tokens, p.temperature, p.top_p, p.top_k) for p in asked.params] == [(7, 1.0, 1.0, 0)]
    text = parse_text({"prompt": "Hi", **dict.fromkeys({*OPTIONAL, "best_of", "echo", "suffix"})}, tokenizer, 7)
    assert text == parse_text({"prompt": "Hi"}, tokenizer, 7)


def test_what_a_request_may_ask_for(tokenizer: Tokenizer) -> None:
    asked = parse_chat(
        {"messages": MESSAGES, "n": 2, "seed": 5, "max_completion_tokens": 3, "max_tokens": 9, "logprobs": True},
        tokenizer,
        7,
    )
    assert [(p.seed, p.max_tokens) for p in asked.params] == [(5, 3), (6, 3)]
    assert asked.logprobs
    assert [
        parse_text({"prompt": "a", "logprobs": given}, tokenizer, 7).logprobs for given in (0, 1, True, False, None)
    ] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_completion_tokens", "x"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", "hot"),
        ("n", 0),
        ("seed", True),
        ("stop", [""]),
        ("stop_token_ids", [True]),
        ("stream_options", 5),
        ("logit_bias", {"5": 1}),
        ("min_p", 0.1),
        ("colour", "red"),
        ("messages", [3]),
        ("messages", []),
        ("top_logprobs", 2),
    ],
)
def test_a_bad_field_is_named(tokenizer: Tokenizer, field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        parse_chat({"messages": MESSAGES, field: value}, tokenizer, 7)
    assert refused.value.field == field
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"), [("logprobs", "x"), ("logprobs", [1]), ("logprobs", 5), ("prompt", [True])]
)
def test_a_bad_field_of_a_text_completion_is_named(tokenizer: Tokenizer, field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        parse_text({"prompt": "a", field: value}, tokenizer, 7)
    assert refused.value.field == field


def output(ids: list[int], versions: list[int], text: str) -> GenerationOutput:
    return GenerationOutput(
        token_ids=ids,
        logprobs=[-0.1 * i for i in range(len(ids))],
        raw_logprobs=[-0.5] * len(ids),
        token_versions=versions,
        finish_reason=FinishReason.LENGTH,
        text=text,
        prompt_len=2,
    )


def asked_for(tokenizer: Tokenizer, **body: Any) -> Asked:
    return parse_text({"prompt": [1, 2], **body}, tokenizer, 7)


def test_answers_have_the_shape_of_the_contract(tokenizer: Tokenizer) -> None:
    asked = asked_for(tokenizer, n=2, logprobs=0, return_token_ids=True)
    outputs = [output([21, 2], [3, 4], ""), output([22], [4], "b")]
    body = answer("chat.completion", "m", asked, outputs)
    assert body["prompt_token_ids"] == [1, 2]
    assert body["inference_version"] == 3
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    first, second = body["choices"]
    assert first["message"] == {"role": "assistant", "content": ""}  # never null
    assert (first["finish_reason"], first["token_ids"]) == ("length", [21, 2])
    assert first["token_inference_versions"] == [3, 4]
    assert "token_inference_versions" not in second
    assert first["raw_logprobs"] == [-0.5, -0.5]
    assert first["logprobs"] == {
        "content": [
            {"token": "token_id:21", "logprob": 0.0, "bytes": None, "top_logprobs": []},
            {"token": "token_id:2", "logprob": -0.1, "bytes": None, "top_logprobs": []},
        ],
        "refusal": None,
    }
    text = answer("text_completion", "m", asked, outputs)["choices"][0]
    assert text["logprobs"] == {
        "tokens": ["token_id:21", "token_id:2"],
        "token_logprobs": [0.0, -0.1],
        "top_logprobs": None,
        "text_offset": [0, 0],
    }
    plain = answer("chat.completion", "m", asked_for(tokenizer), outputs[1:])
    assert "prompt_token_ids" not in plain
    assert plain["choices"][0]["logprobs"] is None
    assert plain["choices"][0]["token_ids"] == [22]  # always
