"""Each chunk of a stream tells the tokens of its text; joined, and as stored for the join, a stream is the whole answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.harness import Served
from upweight.server.api.served import StreamReader, served_of
from upweight.server.store.completions import Served as Stored

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rom"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
DRAWN: dict[str, Any] = {"max_tokens": 40, "temperature": 1, "seed": 7, "return_token_ids": True, "ignore_eos": True}
TEXT: dict[str, Any] = {**DRAWN, "prompt": "One two three", "logprobs": 0}
CHAT: dict[str, Any] = {**DRAWN, "messages": [{"role": "user", "content": "Go on"}], "logprobs": True}
LISTS = ("token_ids", "raw_logprobs", "tempered_logprobs", "token_inference_versions", "prompt_token_ids")


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One choice of a stream, its parts put one behind the other."""
    whole: dict[str, Any] = {"logprobs": {}, "text": "", "calls": []}
    for part in parts:
        delta = part.get("delta", {})
        whole["text"] += part.get("text", "") + (delta.get("content") or "")
        whole["calls"] += [call["function"] for call in delta.get("tool_calls", [])]
        for name in set(LISTS) & part.keys():
            whole[name] = whole.get(name, []) + part[name]
        for name, values in (part["logprobs"] or {}).items():
            whole["logprobs"][name] = None if values is None else (whole["logprobs"].get(name) or []) + values
        for name in ("finish_reason", "seed"):
            whole[name] = part.get(name) if part.get(name) is not None else whole.get(name)
    return whole


def of_answer(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a whole answer in the same form."""
    message = choice.get("message", {})
    text = choice["text"] if "text" in choice else message["content"] or ""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    kept = {name: choice[name] for name in (*LISTS, "finish_reason", "seed") if name in choice}
    return {**kept, "logprobs": choice["logprobs"] or {}, "text": text, "calls": calls}


def stored(body: dict[str, Any], stream: bytes, size: int) -> list[Stored]:
    """What the API process keeps of a stream that comes in pieces of `size` bytes."""
    reader, found, passed = StreamReader(), [], b""
    for start in range(0, len(stream), size):
        for event in reader.feed(stream[start : start + size]):
            passed += event
            found += served_of(body, {"choices": reader.take(event)})
    assert passed + reader.rest == stream
    assert reader.left() == []
    return found


def chunks_of(stream: bytes) -> Iterator[dict[str, Any]]:
    for event in stream.split(b"\n\n")[:-2]:
        yield json.loads(event.removeprefix(b"data: "))


def compare(body: dict[str, Any], answer: httpx.Response, stream: bytes) -> list[list[dict[str, Any]]]:
    """Asserts that a stream is the answer; gives the parts of each choice."""
    whole, chunks = answer.json(), list(chunks_of(stream))
    parts: list[list[dict[str, Any]]] = []
    for choice in whole["choices"]:
        parts.append([c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]])
        expected = of_answer(choice)
        expected.pop("prompt_token_ids", None)
        assert joined(parts[-1]) == expected
    whole_stored = served_of(body, whole)
    told = "prompt_token_ids" in whole
    assert len(whole_stored) == sum(told and bool(choice["token_ids"]) for choice in whole["choices"])
    for size in (7, 1000, 10**6):
        assert sorted(stored(body, stream, size), key=repr) == sorted(whole_stored, key=repr)
    return parts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", TEXT),
        ("completions", {**TEXT, "logprobs": 3, "n": 3}),
        ("completions", {**TEXT, "echo": True, "n": 2}),
        ("completions", {**TEXT, "echo": True, "logprobs": None}),
        ("completions", {**TEXT, "echo": True, "max_tokens": 0}),
        ("completions", {**TEXT, "logprobs": None}),
        ("completions", {**TEXT, "temperature": 0.7, "top_p": 0.9}),
        ("completions", {**TEXT, "prompt": [[8, 9], [5, 6, 7]], "n": 2}),
        ("completions", {**TEXT, "stop": ["e", "in", "th"], "n": 4}),
        ("completions", {**TEXT, "ignore_eos": False, "logit_bias": {"2": 4}}),
        ("completions", {**TEXT, "return_token_ids": False, "logprobs": 2}),
        ("chat/completions", CHAT),
        ("chat/completions", {**CHAT, "n": 3, "top_logprobs": 2, "stop": [" a", "s"]}),
        ("chat/completions", {**CHAT, "logprobs": None, "n": 2}),
        ("chat/completions", {**CHAT, "tools": TOOLS, "n": 2}),
        ("chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": 90, "ignore_eos": None}),
        ("chat/completions", {**CHAT, "return_token_ids": False, "top_logprobs": 1}),
    ],
)  # fmt: skip
def test_a_stream_joined_is_the_answer(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = served.post(path, **body)
    assert answer.status_code == 200, answer.text
    stream = served.post(path, **body, stream=True).content
    for parts in compare(body, answer, stream):
        told = [part["token_ids"] for part in parts if part.get("token_ids")]
        assert len(told) >= sum(map(len, told)) / 4 or "tools" in body
    third = {"tempered_logprobs" in choice for choice in answer.json()["choices"]}
    assert third == {body["temperature"] != 1}


def test_each_piece_of_text_is_that_of_its_tokens(served: Served) -> None:
    """Also where a character is spelled by several tokens: a random model draws many that are parts of one."""
    tokenizer = served.core.model.tokenizer
    body = {**TEXT, "max_tokens": 300, "seed": 3}
    text, ids, several = "", [], 0
    for chunk in chunks_of(served.post("completions", **body, stream=True).content):
        (choice,) = chunk["choices"]
        text, ids = text + choice["text"], ids + choice.get("token_ids", [])
        assert text == tokenizer.decode(ids)
        several += len(choice.get("token_ids", [])) > 1
    assert several > 1


def test_a_stop_string_ends_the_text_and_its_tokens_close_the_stream(served: Served) -> None:
    whole = served.post("completions", **{**TEXT, "temperature": 0}).json()["choices"][0]["text"]
    stop = whole[10:24]
    body = {**TEXT, "temperature": 0, "stop": stop}
    (parts,) = compare(
        body, served.post("completions", **body), served.post("completions", **body, stream=True).content
    )
    assert "".join(part["text"] for part in parts) == whole[: whole.index(stop)]
    assert parts[-1]["finish_reason"] == "stop"


def test_versions_of_a_stream_that_lives_through_a_swap(served: Served) -> None:
    engine = served.core.engine
    first = engine.version
    body = {**TEXT, "max_tokens": 400, "n": 2, "logprobs": None}
    with served.http.stream("POST", "/openai/v1/completions", json={**body, "stream": True}) as answer:
        raw = answer.iter_raw()
        begun = b"".join(itertools.islice(raw, 8))
        engine.set_weights(dict(engine.runner.params), first + 1)
        stream = begun + b"".join(raw)
    assert served.post("completions", **{**TEXT, "max_tokens": 1}).json()["inference_version"] == first + 1
    choices = [joined([c for e in chunks_of(stream) for c in e["choices"] if c["index"] == i]) for i in (0, 1)]
    for choice in choices:
        versions = choice["token_inference_versions"]
        assert set(versions) == {first, first + 1}
        assert versions == sorted(versions)
        assert len(versions) == len(choice["token_ids"]) == 400
    kept = stored(body, stream, 1000)
    assert [one.versions for one in kept] != []
    assert all(len(set(one.versions[::4])) == 2 for one in kept)
