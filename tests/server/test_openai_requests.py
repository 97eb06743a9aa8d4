"""Bodies of completion requests: whatever their fields hold, the answer names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from upweight.errors import RequestError
from upweight.server.worker.openai_requests import parse_chat, parse_text
from upweight.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[1] / "data" / "smollm2")
MESSAGES = [{"role": "user", "content": "hi"}]
WRONG: list[tuple[str, list[Any]]] = [
    ("n", ["1", 0, 129, 1.0, True, [], {}]),
    ("max_tokens", ["1", -1, 1.5, True, float("nan")]),
    ("temperature", ["1", True, [], {}]),
    ("top_k", ["1", 1.5, True]),
    ("seed", ["1", 1.5, True, []]),
    ("stop", ["", [""], [1], {}, 0, False, ["a"] * 17]),
    ("stream", ["false", 1, []]),
    ("stream_options", ["x", 1, False, []]),
    ("return_token_ids", ["yes", 1]),
    ("ignore_eos", ["no", 0]),
    ("stop_token_ids", ["1", 1, [True], [1.5], {}]),
    ("logprobs", ["x", 2, -1, 0.5, [], {}, float("nan")]),
    ("tools", ["x", [{}]]),
    ("nonsense", [1]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG for value in values])
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        parse_text({"prompt": "hi", field: value}, TOKENIZER, 4)
    assert refused.value.field == field
    with pytest.raises(RequestError, match=field):
        parse_chat({"messages": MESSAGES, field: value}, TOKENIZER, 4)


@pytest.mark.parametrize("value", ["1", -1, 1.5, True, [1], {}, float("nan")])
def test_a_wrong_completion_limit_is_named_as_it_was_sent(value: Any) -> None:
    with pytest.raises(RequestError, match="max_completion_tokens"):
        parse_chat({"messages": MESSAGES, "max_completion_tokens": value}, TOKENIZER, 4)


@pytest.mark.parametrize("prompt", [None, [], [None], [1, "a"], [True], [[True]], [1.5], {}, 5])
def test_a_prompt_that_is_none(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        parse_text({"prompt": prompt}, TOKENIZER, 4)
