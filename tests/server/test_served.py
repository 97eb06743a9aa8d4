"""What is remembered of a request: whether its log-probs are those of an unfiltered distribution, and its output alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from upweight.server.api.served import sampling_of, served_of

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
    ],
)
def test_what_changes_the_distribution_is_known(request_: dict[str, Any], filtered: bool) -> None:
    assert sampling_of(request_)[1] is filtered


def test_the_values_of_an_echoed_prompt_are_left_out() -> None:
    choice = {
        "token_ids": [21, 2],
        "raw_logprobs": [-0.5, -0.6],
        "logprobs": {"tokens": ["a", "b", "c", "d"], "token_logprobs": [None, -9.0, -0.1, -0.2]},
    }
    (served,) = served_of({}, {"prompt_token_ids": [1, 3], "inference_version": 0, "choices": [choice]})
    assert np.frombuffer(served.logprobs or b"", "<f4").tolist() == pytest.approx([-0.1, -0.2])
