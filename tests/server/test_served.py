"""What is remembered of a request: whether its log-probs are those of an unfiltered distribution, and its output alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from upweight.server.api.served import StreamReader, sampling_of, served_of

FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("request_", "filtered"),
    [
        ({}, False),
        ({"temperature": 0.5, "max_tokens": 9, "seed": 1, "stop": "x"}, False),
        ({"response_format": {"type": "text"}, "tool_choice": "auto", "min_tokens": 0, "logit_bias": {}}, False),
        ({"top_p": 0.9}, True),
        ({"presence_penalty": 0.1}, True),
        ({"logit_bias": {"5": 1}}, True),
        ({"min_tokens": 2}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": FORM}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": NAMED}, True),
        ({"min_tokens": []}, True),
        ({"top_k": "many"}, True),
        ({"response_format": "json"}, True),
        ({"temperature": []}, False),
    ],
)
def test_what_changes_the_distribution_is_known(request_: dict[str, Any], filtered: bool) -> None:
    assert sampling_of(request_)[1] is filtered


def test_a_filtered_answer_is_remembered_by_the_whole_distribution_at_its_temperature() -> None:
    choice = {
        "token_ids": [21, 2],
        "raw_logprobs": [-0.5, -0.6],
        "tempered_logprobs": [-0.3, -0.4],
        "logprobs": {"tokens": ["token_id:21", "token_id:2"], "token_logprobs": [-0.1, -0.2]},
    }
    answer = {"prompt_token_ids": [1, 3], "inference_version": 0, "choices": [choice]}
    for request, wanted in (
        ({"top_p": 0.9, "temperature": 0.7}, [-0.3, -0.4]),
        ({"top_p": 0.9}, [-0.5, -0.6]),
        ({"temperature": 0}, [-0.5, -0.6]),
        ({"temperature": 0.7}, [-0.5, -0.6]),  # never read: its own are those of the whole distribution
    ):
        (served,) = served_of(request, answer)
        assert np.frombuffer(served.raw_logprobs or b"", "<f4").tolist() == pytest.approx(wanted)


def test_a_streamed_answer_keeps_its_log_probs_at_its_temperature() -> None:
    reader = StreamReader()
    parts = [
        {"token_ids": [21], "tempered_logprobs": [-0.3]},
        {"token_ids": [2], "tempered_logprobs": [-0.4], "finish_reason": "stop"},
    ]
    told = [reader.take(b"data: " + json.dumps({"choices": [part]}).encode()) for part in parts]
    assert told[0] == []
    assert told[1][0]["tempered_logprobs"] == [-0.3, -0.4]


def test_the_values_of_an_echoed_prompt_are_left_out() -> None:
    choice = {
        "token_ids": [21, 2],
        "raw_logprobs": [-0.5, -0.6],
        "logprobs": {"tokens": ["a", "b", "c", "d"], "token_logprobs": [None, -9.0, -0.1, -0.2]},
    }
    (served,) = served_of({}, {"prompt_token_ids": [1, 3], "inference_version": 0, "choices": [choice]})
    assert np.frombuffer(served.logprobs or b"", "<f4").tolist() == pytest.approx([-0.1, -0.2])
