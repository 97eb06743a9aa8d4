"""Every reference id and text of tests/data, from both kinds of file."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from upweight.errors import RequestError
from upweight.tokenizer import Tokenizer

Rows = list[dict[str, Any]]


@pytest.fixture(params=["tokenizer", "folder_tokenizer"])
def either(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def test_strings(either: Tokenizer, strings: Rows) -> None:
    assert len(strings) == 40
    for row in strings:
        assert either.encode(row["text"]) == row["ids"], row["name"]
        assert either.encode(row["text"], special=False) == row["ids_no_special"], row["name"]
        assert [either.token_text(token_id) for token_id in row["ids"]] == row["tokens"], row["name"]
        assert either.decode(row["ids"], skip_special_tokens=False) == row["decoded"], row["name"]
        plain = either.decode(row["ids_no_special"], skip_special_tokens=False)
        assert plain == row["decoded_no_special"], row["name"]
        assert (row["decoded"] == row["text"]) == row["round_trip"], row["name"]


def test_templates(either: Tokenizer, templates: Rows) -> None:
    assert len(templates) == 12
    for row in templates:
        assert either.render(row["messages"]) == row["text"], row["name"]
        shorter = either.render(row["messages"], add_generation_prompt=False)
        assert shorter == row["text_without_generation_prompt"], row["name"]
        assert either.encode_chat(row["messages"]) == row["token_ids"], row["name"]


def test_prompts(either: Tokenizer, conversations: Rows) -> None:
    assert len(conversations) == 8
    for row in conversations:
        assert either.render(row["messages"]) == row["text"], row["name"]
        assert either.encode_chat(row["messages"]) == row["token_ids"], row["name"]
        greedy = row["greedy"]
        assert either.decode(greedy["token_ids"], skip_special_tokens=False) == greedy["text"], row["name"]
        assert [*either.encode(row["completion"]["text"]), 2] == row["completion"]["token_ids"], row["name"]


def test_ids_and_sizes(either: Tokenizer) -> None:
    assert either.eos_ids == (2,)
    assert either.pad_id == 2
    assert either.vocab_size == 49152
    assert either.special_ids == frozenset(range(17))


def test_special_tokens_are_skipped_on_request(either: Tokenizer) -> None:
    ids = either.encode("<|im_start|>user\nhi<|im_end|>")
    assert either.decode(ids) == "user\nhi"
    assert either.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"


def test_token_bytes_join_to_the_text(either: Tokenizer, strings: Rows) -> None:
    for row in strings:
        joined = b"".join(either.token_bytes(token_id) for token_id in row["ids"])
        assert joined.decode("utf-8", "replace") == row["decoded"], row["name"]


def test_missing_bytes_are_in_no_token(tokenizer: Tokenizer) -> None:
    path = Path(__file__).parents[1] / "data" / "tokenizer" / "strings.json"
    missing = json.loads(path.read_text())["missing_bytes"]
    present = set().union(*(tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)))
    assert sorted(set(range(256)) - present) == missing


def test_ids_without_a_token_add_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(49152) == b""
    assert tokenizer.decode([28120, 60000, 905]) == "hello world"


def test_loading_a_gguf_is_fast(smollm_gguf: Path) -> None:
    start = time.process_time()
    Tokenizer.from_gguf(smollm_gguf)
    assert time.process_time() - start < 0.7  # measured: 0.09 s on two shared cores


def test_what_is_no_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"'\\ud800'.* at character 1"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(RequestError, match="it is int"):
        tokenizer.encode(3)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="surrogate") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "\udfff"}])
    assert caught.value.field == "messages"


def test_long_texts_are_cut_as_short_ones_are_and_let_other_threads_run(either: Tokenizer, strings: Rows) -> None:
    text = "".join(row["text"] for row in strings) * 2
    while len(text) <= 500_000:
        text += text
    ticks, ended = 0, threading.Event()

    def count() -> None:
        nonlocal ticks
        while not ended.wait(0.001):
            ticks += 1

    watcher = threading.Thread(target=count)
    watcher.start()
    before = ticks
    ids = either.encode(text)
    during = ticks - before
    ended.set()
    watcher.join()
    assert during > 5
    assert ids == either._core.encode(text, add_special_tokens=False).ids
    with pytest.raises(RequestError):
        either.encode(text + "\ud800")
