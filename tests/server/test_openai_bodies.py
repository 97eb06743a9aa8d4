"""The answers of the OpenAI routes, as the contract of rollouts and as OpenAI's own clients read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from request_makers import MESSAGES, SERVING, TOKENIZER, TOOLS, said

from upweight.inference.types import FinishReason, GenerationOutput
from upweight.server.worker.asked import Asked
from upweight.server.worker.openai_answers import CHAT, TEXT, OpenAIAnswers
from upweight.server.worker.openai_requests import parse_chat, parse_text


def answer(kind: str, asked: Asked, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    return OpenAIAnswers(kind, "m", asked, TOKENIZER).whole(outputs)


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


def asked_for(**body: Any) -> Asked:
    return parse_text({"prompt": [1, 2], **body}, SERVING)


def test_answers_have_the_shape_of_the_contract() -> None:
    asked = asked_for(n=2, logprobs=0, return_token_ids=True)
    outputs = [output([21, 2], [3, 4], ""), output([22], [4], "b")]
    body = answer(CHAT, asked, outputs)
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
    assert second["token_inference_versions"] == [4]  # not the answer's version
    assert first["raw_logprobs"] == [-0.5, -0.5]
    assert first["logprobs"] == {
        "content": [
            {"token": "token_id:21", "logprob": 0.0, "bytes": None, "top_logprobs": []},
            {"token": "token_id:2", "logprob": -0.1, "bytes": None, "top_logprobs": []},
        ],
        "refusal": None,
    }
    text = answer(TEXT, asked, outputs)["choices"][0]
    assert text["logprobs"] == {
        "tokens": ["token_id:21", "token_id:2"],
        "token_logprobs": [0.0, -0.1],
        "top_logprobs": None,
        "text_offset": [0, 1],  # token 21 is one character of text
    }
    plain = answer(CHAT, asked_for(), outputs[1:])
    assert "prompt_token_ids" not in plain
    assert plain["inference_version"] == 4
    assert "token_inference_versions" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None
    assert plain["choices"][0]["token_ids"] == [22]  # always


def test_without_ids_tokens_are_named_by_text_and_bytes() -> None:
    asked = parse_chat({"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}, SERVING)
    ids = TOKENIZER.encode("\u00e9\U0001f600")
    others = [[(5, -0.01), (6, -3.0)]] * (len(ids) + 1)
    content = answer(CHAT, asked, [said("\u00e9\U0001f600", top_logprobs=others)])["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == "\u00e9\U0001f600"
    assert content[-1]["token"] == "<|im_end|>"
    first = content[0]["top_logprobs"]
    assert [(entry["token"], entry["logprob"]) for entry in first] == [
        (TOKENIZER.token_text(5), -0.01),
        (TOKENIZER.token_text(6), -3.0),
    ]


def test_tokens_that_could_not_be_drawn_are_no_alternatives() -> None:
    asked = parse_chat({"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}, SERVING)
    one = said("", top_logprobs=[[(5, -0.01), (6, float("-inf"))]])
    (entry,) = answer(CHAT, asked, [one])["choices"][0]["logprobs"]["content"]
    assert [other["token"] for other in entry["top_logprobs"]] == [TOKENIZER.token_text(5)]


def test_alternatives_of_a_text_completion_hold_the_drawn_token() -> None:
    ids = TOKENIZER.encode("ab cd")
    drawn = said("ab cd", top_logprobs=[[(7, -0.5)]] * (len(ids) + 1))
    told = answer(TEXT, asked_for(logprobs=1), [drawn])["choices"][0]["logprobs"]
    assert told["top_logprobs"][0] == {TOKENIZER.token_text(7): -0.5, told["tokens"][0]: 0.0}
    assert told["text_offset"] == [0, 2, 5]
    assert "".join(told["tokens"][:-1]) == "ab cd"


def test_echo_puts_the_prompt_before_text_and_log_probs() -> None:
    prompt = TOKENIZER.encode("One two")
    asked = parse_text({"prompt": "One two", "echo": True, "logprobs": 0, "n": 2}, SERVING)
    one = said(" three", prompt_logprobs=[None, *[-1.5] * (len(prompt) - 1)])
    for choice in answer(TEXT, asked, [one, one])["choices"]:
        told = choice["logprobs"]
        assert choice["text"] == "One two three"
        assert "".join(told["tokens"][:-1]) == "One two three"
        assert told["token_logprobs"] == [None, *[-1.5] * (len(prompt) - 1), *one.logprobs]
        assert told["text_offset"] == [0, 3, 7, 13]
        assert choice["token_ids"] == one.token_ids  # of the answer alone


def test_prompt_log_probs_are_told_when_asked_for() -> None:
    one, two = said("a", prompt_logprobs=[None, -1.0]), said("b", prompt_logprobs=[None, -2.0])
    body = answer(TEXT, asked_for(prompt_logprobs=True), [one])
    assert body["prompt_logprobs"] == [None, -1.0]
    both = answer(TEXT, asked_for(prompt=[[1, 2], [3, 4]], prompt_logprobs=True), [one, two])
    assert [choice["prompt_logprobs"] for choice in both["choices"]] == [[None, -1.0], [None, -2.0]]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def test_calls_are_told_apart_from_content() -> None:
    asked = parse_chat({"messages": MESSAGES, "tools": TOOLS}, SERVING)
    choice = answer(CHAT, asked, [said(f"I look.\n{CALL}")])["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
    assert answer(CHAT, asked, [said(CALL)])["choices"][0]["message"]["content"] is None
    cut = answer(CHAT, asked, [said(CALL, finish_reason=FinishReason.LENGTH)])["choices"][0]
    assert cut["finish_reason"] == "length"


def test_calls_that_may_not_be_made_stay_text() -> None:
    undeclared = CALL.replace("weather", "stock")
    for body, text in (({"tools": TOOLS}, undeclared), ({"tools": TOOLS, "tool_choice": "none"}, CALL), ({}, CALL)):
        asked = parse_chat({"messages": MESSAGES, **body}, SERVING)
        choice = answer(CHAT, asked, [said(text)])["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["finish_reason"] == "stop"


def test_one_call_where_several_are_not_wanted() -> None:
    asked = parse_chat({"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}, SERVING)
    assert len(answer(CHAT, asked, [said(f"{CALL}\n{CALL}")])["choices"][0]["message"]["tool_calls"]) == 1
