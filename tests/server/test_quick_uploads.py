"""The quick reader of uploads gives what the patient one gives, or leaves the upload to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upweight.server.api.quick_uploads import read_quickly
from upweight.server.api.uploads import read_patiently
from upweight.server.refusals import Refusal

GOOD: dict[str, Any] = {
    "id": "s",
    "token_ids": [1, 2, 3],
    "logprobs": [0.0, -0.5, -0.1234567890123456789],
    "mask": [0, 1, 1],
    "normalized_reward": 0.5,
    "metadata": {"a": "b"},
    "debug_info": {"task_id": "t", "reward": 1},
}


def body(*samples: dict[str, Any], **around: Any) -> bytes:
    return json.dumps({"samples": samples, **around}).encode()


def patient(text: bytes, needs_task: bool) -> object:
    try:
        return read_patiently(text, needs_task)
    except Refusal:
        return None


def test_what_nearly_all_uploads_are_is_read_quickly() -> None:
    for count in (0, 1, 3, 40):
        text = body(
            *({**GOOD, "id": f"s{i}", "debug_info": {"task_id": i, "lists": [[1.5], "[x"]}} for i in range(count))
        )
        read = read_quickly(text, True)
        assert read is not None
        assert read == read_patiently(text, True)
    assert read_quickly(body({**GOOD, "unknown": [1, {"a": [2]}]}, more=[[]]), True) is not None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"samples": [',
        b'{"samples": {}}',
        b'{"samples": [1]}',
        b"\xef\xbb\xbf" + body(GOOD),
        body(GOOD)[:-1] + b', "samples": []}',
        body(GOOD).replace(b'"id": "s"', b'"id": "s", "id": "other"'),
        *(
            body({**GOOD, **changes})
            for changes in (
                {"id": ""},
                {"id": 7},
                {"token_ids": []},
                {"token_ids": [1, 2]},
                {"token_ids": [[1], 2, 3]},
                {"token_ids": [[1], [2], [3]]},
                {"token_ids": [1, 2, -1]},
                {"token_ids": [1, 2, 2**31]},
                {"token_ids": [1, 2, 2**70]},
                {"token_ids": [1, 2, True]},
                {"token_ids": [1, 2, 3.0]},
                {"token_ids": None},
                {"logprobs": [0.0, [-0.5], -0.25]},
                {"logprobs": [0.0, -0.5, 1e39]},
                {"logprobs": [0.0, -0.5, "-0.25"]},
                {"logprobs": [0.0, -0.5, float("nan")]},
                {"logprobs": [0.0, -0.5, float("inf")]},
                {"mask": [0, 1, 2]},
                {"mask": [0, 1, -1]},
                {"mask": [0, 1, False]},
                {"normalized_reward": True},
                {"normalized_reward": "1"},
                {"normalized_reward": 1e39},
                {"normalized_reward": None},
                {"metadata": {"a": 1}},
                {"metadata": []},
                {"debug_info": {}},
                {"debug_info": {"task_id": 1.5}},
                {"debug_info": "task_id"},
            )
        ),
    ],
)
def test_what_is_wrong_or_unusual_is_left_to_the_patient_reader(text: bytes) -> None:
    assert read_quickly(text, True) is None


numbers = st.one_of(
    st.integers(-3, 2**31 + 1), st.floats(), st.booleans(), st.none(), st.integers(-(2**70), 2**70), st.text(max_size=3)
)
values = st.recursive(
    numbers, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
odd_samples = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=4),
        "token_ids": st.lists(st.integers(0, 9), max_size=4) | values,
        "logprobs": st.lists(st.floats(-2, 0, width=32), min_size=3, max_size=3) | values,
        "mask": st.lists(st.integers(0, 1), min_size=3, max_size=3) | values,
        "normalized_reward": st.floats(-1, 1) | values,
        "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3)) | values,
        "debug_info": st.dictionaries(st.text(max_size=3), values, max_size=3) | values,
    },
)


@given(st.lists(odd_samples, max_size=3), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_whatever_an_upload_holds_it_is_read_as_the_patient_reader_does(
    changes: list[dict[str, Any]], needs_task: bool, as_ascii: bool
) -> None:
    text = json.dumps({"samples": [GOOD | change for change in changes]}, ensure_ascii=as_ascii).encode(
        errors="replace"
    )
    read = read_quickly(text, needs_task)
    assert read is None or read == patient(text, needs_task)


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=40), st.floats(-3, 3))
@settings(max_examples=100, deadline=None)
def test_numbers_are_the_same_to_the_last_digit(logprobs: list[float], reward: float) -> None:
    count = len(logprobs)
    sample = {**GOOD, "token_ids": list(range(count)), "logprobs": logprobs, "mask": [1] * count}
    text = body({**sample, "normalized_reward": reward})
    read = read_quickly(text, True)
    assert read is not None
    assert read == read_patiently(text, True)
