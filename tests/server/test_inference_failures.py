"""What a client sees when the worker refuses, is late, breaks off or is gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from server_harness import Running, Start

from upweight.errors import StoreError
from upweight.server.api.inference import PassedOn
from upweight.server.store import completions

BODY: dict[str, Any] = {"messages": [], "max_tokens": 1}


def ready(server: Running) -> str:
    job = server.create_job()
    server.wait(job, lambda p: p["inference_version"] is not None)
    return job


def ask(server: Running, job: str, model: str, path: str = "chat/completions", **more: Any) -> httpx.Response:
    return server.http.post(server.rl(job, f"inference/openai/v1/{path}"), json={**BODY, "model": model, **more})


def test_refusals_keep_status_and_time_to_come_again(start: Start) -> None:
    server = start()
    job = ready(server)
    for stream in (False, True):
        for path in ("chat/completions", "completions", "messages"):
            busy = ask(server, job, "status 429 7", path, stream=stream)
            assert (busy.status_code, busy.headers["retry-after"]) == (429, "7")
            late = ask(server, job, "status 504", path, stream=stream)
            assert (late.status_code, late.json()["detail"]) == (504, "refused with 504")
            down = ask(server, job, "status 503", path, stream=stream)
            assert (down.status_code, down.headers["retry-after"]) == (503, "2")
            assert down.json()["error"]["message"] == down.reason_phrase == "refused with 503"


@pytest.mark.parametrize(
    ("path", "kind"),
    [("chat/completions", "server_error"), ("completions", "server_error"), ("messages", "timeout_error")],
)
def test_a_worker_that_is_late_is_504_in_the_form_of_the_route(start: Start, path: str, kind: str) -> None:
    server = start({"generate_seconds": 20}, inference_timeout=0.3)
    answer = ask(server, ready(server), "m", path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, kind)
    assert answer.json()["error"]["message"] == "the worker did not answer within 0.3 s"


def test_an_answer_that_breaks_off_is_asked_for_again(start: Start) -> None:
    server = start()
    answer = ask(server, ready(server), "breaks")
    assert (answer.status_code, answer.json()["choices"][0]["token_ids"]) == (200, [21, 22, 2])


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_stream_that_breaks_off_says_so_in_the_form_of_the_route(start: Start, path: str) -> None:
    server = start()
    answer = ask(server, ready(server), "breaks", path, stream=True)
    assert answer.status_code == 200
    first, last, rest = answer.text.split("\n\n")
    assert (first, rest) == ("data: {}", "")
    name, _, data = last.rpartition("data: ")
    assert name == ("event: error\n" if path == "messages" else "")
    error = json.loads(data)["error"]
    assert error["type"] == ("overloaded_error" if path == "messages" else "server_error")
    assert error["message"].startswith("the worker broke off")


def test_a_stream_that_cannot_be_stored_ends_with_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    job = ready(server)

    def full(*_: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(completions, "remember", full)
    text = ask(server, job, "m", stream=True).text
    assert "[DONE]" not in text
    assert "was not stored" in json.loads(text.rpartition("data: ")[2])["error"]["message"]
    whole = ask(server, job, "m")
    assert (whole.status_code, "nothing was stored" in whole.json()["error"]["message"]) == (503, True)


def test_a_stream_that_never_begins_is_closed_for_the_worker_too() -> None:
    class Source(httpx.AsyncByteStream):
        closed = False

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b""

        async def aclose(self) -> None:
            self.closed = True

    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    source = Source()
    response = PassedOn(httpx.Response(200, stream=source), never())
    asyncio.run(response({"type": "http", "asgi": {"spec_version": "2.3"}}, gone, send))
    assert source.closed


def test_health_is_503_while_the_engine_of_a_served_model_is_gone(start: Start) -> None:
    server = start(restart_backoff=1.0)
    with httpx.Client(base_url=server.http.base_url) as anybody:
        assert anybody.get("/health").json() == {"status": "ok", "engines": 0}
        job = ready(server)
        assert anybody.get("/health").json() == {"status": "ok", "engines": 1}
        pid = server.wait(job, lambda p: p["worker"])["worker"]["pid"]
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while (sick := anybody.get("/health")).status_code == 200:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert (sick.status_code, sick.headers["retry-after"]) == (503, "2")
        assert sick.json()["detail"] == "1 of 1 engines ended and are being started again"
        assert anybody.get("/healthz").status_code == 200
        assert ask(server, job, "m").status_code == 200  # it waits for the next worker
        assert anybody.get("/health").status_code == 200
