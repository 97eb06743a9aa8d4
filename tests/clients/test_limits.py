"""Streams left, time limits, full queues and a dead engine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.harness import Served
from upweight.server.worker.app import make_app
from upweight.server.worker.core import WorkerCore

LONG: dict[str, Any] = {"prompt": "Go on", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def events(answer: httpx.Response) -> Iterator[dict[str, Any] | str]:
    """Server-sent events of a stream, strictly: `data: …` and an empty line each."""
    for block in answer.read().decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition(": ")
        assert name == "data"
        assert "\n" not in data
        yield data if data == "[DONE]" else json.loads(data)


def test_a_stream_is_well_formed_to_the_byte(served: Served) -> None:
    body = {**LONG, "max_tokens": 20, "n": 2, "temperature": 1, "seed": 1, "logprobs": 2, "stop": ["e"]}
    whole = served.post("completions", **body).json()
    *chunks, done = events(served.post("completions", **body, stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert all(isinstance(chunk, dict) and chunk["object"] == "text_completion" for chunk in chunks)
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]  # type: ignore[index]
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]  # type: ignore[index]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [i for c in mine for i in c.get("token_ids", [])] == choice["token_ids"]
        told = [c["logprobs"] for c in mine if c["logprobs"]]
        assert {name: [v for one in told for v in one[name]] for name in told[0]} == choice["logprobs"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]


def test_the_end_of_an_answer_is_told_truly(served: Served) -> None:
    whole = served.post("completions", **{**LONG, "max_tokens": 20}).json()["choices"][0]
    stop = whole["text"][4:6]
    stopped = served.post("completions", **{**LONG, "max_tokens": 20, "stop": stop}).json()["choices"][0]
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", whole["text"][: whole["text"].index(stop)])
    assert stopped["token_ids"] == whole["token_ids"][: len(stopped["token_ids"])]
    assert whole["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["completions", "chat/completions", "messages"])
def test_a_stream_that_is_left_frees_its_rows(served: Served, path: str) -> None:
    body = {**LONG, "messages": [{"role": "user", "content": "Go on"}], "stream": True}
    for name in {"completions": ["messages"], "messages": ["prompt", "ignore_eos"]}.get(path, ["prompt"]):
        del body[name]
    before = served.core.engine.stats()["total_tokens"]
    with served.http.stream("POST", f"/openai/v1/{path}", json=body) as answer:
        assert answer.status_code == 200
        next(answer.iter_raw())
    served.quiet()
    assert served.core.engine.stats()["total_tokens"] - before < 300


def test_a_request_that_is_left_frees_its_row(served: Served) -> None:
    before = served.core.engine.stats()["total_tokens"]
    with pytest.raises(httpx.ReadTimeout):
        served.http.post("/openai/v1/completions", json=LONG, timeout=0.1)
    served.quiet()
    assert served.core.engine.stats()["total_tokens"] - before < 300


def test_a_time_limit_ends_a_request(served: Served) -> None:
    late = served.post("completions", **LONG, timeout=0.05)
    assert late.status_code == 504
    assert late.json()["error"]["message"] == "the request took longer than its time limit of 0.05 s and was aborted"
    *_, last = events(served.post("completions", **LONG, timeout=0.05, stream=True))
    assert isinstance(last, dict)
    assert "time limit of 0.05 s" in last["error"]["message"]
    served.quiet()
    above = served.post("completions", **LONG, timeout=61)
    assert (above.status_code, above.json()["error"]["param"]) == (400, "timeout")


def test_a_full_queue_says_when_to_come_again(served: Served) -> None:
    first = threading.Thread(target=served.post, args=("completions",), kwargs={**LONG, "n": 64, "max_tokens": 40})
    first.start()
    end = time.monotonic() + 10
    while served.core.engine.stats()["active_tasks"] == 0:
        assert time.monotonic() < end
        time.sleep(0.005)
    full = served.post("completions", prompt="a", n=8)
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert full.json()["error"]["type"] == "rate_limit_error"
    first.join(60)
    assert not first.is_alive()
    served.quiet()


class BrokenRunner:
    """The device fails in every step from now on."""

    num_programs = 0

    def __init__(self, params: Any) -> None:
        self.params = params

    def prefill(self, rows: Any) -> Any:
        raise RuntimeError("the device is gone")

    def reset(self) -> None:
        pass  # new stores help nothing


def test_an_engine_that_cannot_go_on_fails_all_requests_at_once_in_the_form_of_the_route(
    served: Served, tmp_path: Path
) -> None:
    spec = served.core.spec.model_copy(update={"folder": str(tmp_path), "max_slots": 2})
    core = WorkerCore(spec)
    core.start()
    core.wait_ready()
    core.engine.runner = BrokenRunner(core.engine.runner.params)  # type: ignore[assignment]
    assert served.http.get("/health").status_code == 200

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(make_app(core))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            assert (await client.get("/health")).status_code == 200
            under_way = [client.post("/openai/v1/completions", json={**LONG, "n": 2}) for _ in range(6)]
            statuses = [answer.status_code for answer in await asyncio.gather(*under_way)]
            assert sorted(set(statuses)) == [500, 503]  # in a step that failed, and waiting when the last one did
            assert (await client.get("/health")).status_code == 503
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            bodies = {"chat/completions": chat, "messages": chat, "completions": {"prompt": "a", "stream": True}}
            return [await client.post(f"/openai/v1/{path}", json=body) for path, body in bodies.items()]

    chat, message, text = asyncio.run(asyncio.wait_for(ask(), 30))
    assert core.engine.wait_for_end() == "the engine failed 3 times in a row, last: the device is gone"
    assert [chat.status_code, message.status_code, text.status_code] == [503] * 3
    assert chat.json()["error"]["type"] == text.json()["error"]["type"] == "server_error"
    assert message.json()["error"]["type"] == "overloaded_error"
    assert "the device is gone" in message.json()["error"]["message"]


def test_more_choices_than_the_queue_holds_are_a_bad_request(served: Served) -> None:
    answer = served.post("completions", prompt=["a"] * 3, n=30)
    assert answer.status_code == 400
    assert "90 choices; at most 64" in answer.json()["error"]["message"]


@pytest.mark.parametrize("levels", [60, 99, 101, 400, 900, 5000, 100_000])
@pytest.mark.parametrize("field", ["tools", "response_format", "stop", "messages", "prompt", "unknown"])
def test_nesting_of_any_depth_is_answered(served: Served, levels: int, field: str) -> None:
    deep = "[" * levels + "]" * levels
    kinds = {
        "tools": f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"a": {deep}}}}}}}]',
        "response_format": f'{{"type": "json_schema", "json_schema": {{"name": "f", "schema": {{"enum": {deep}}}}}}}',
        "messages": f'[{{"role": "user", "content": {deep}}}]',
    }
    chat = '"messages": [{"role": "user", "content": "a"}]'
    rest = {"prompt": '"max_tokens": 2', "messages": '"max_tokens": 2'}.get(field, f'{chat}, "max_tokens": 2')
    body = f'{{{rest}, "{field}": {kinds.get(field, deep)}}}'
    path = "completions" if field == "prompt" else "chat/completions"
    answer = served.http.post(f"/openai/v1/{path}", content=body)
    fine = {200, 400} if field in ("tools", "response_format") and levels < 100 else {400}
    assert answer.status_code in fine, answer.text[:300]
    assert len(answer.text) < 2000 or answer.status_code == 200


def test_a_grammar_that_becomes_too_complex_is_a_bad_request(served: Served) -> None:
    schema = {"type": "string", "pattern": "^(a{1000}){1000}$"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"prompt": "a", "max_tokens": 9, "response_format": form}
    answer = served.post("completions", **body)
    assert answer.status_code == 400
    assert "cannot be followed" in answer.json()["error"]["message"]
    *_, last = events(served.post("completions", **body, stream=True))
    assert isinstance(last, dict)
    assert "cannot be followed" in last["error"]["message"]


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(served: Served) -> None:
    huge = "word " * 5_000_000
    began = time.monotonic()
    text = served.post("completions", prompt=huge)
    chat = served.post("messages", messages=[{"role": "user", "content": huge}], max_tokens=1)
    assert time.monotonic() - began < 5
    assert [text.status_code, chat.status_code] == [400, 400]
    assert text.json()["error"]["message"].startswith("prompt too long: 25000000 characters, at most ")
    assert chat.json()["error"]["message"].startswith("messages too long: ")
