"""The public inference routes over the whole way: API process, worker process, engine."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.clients.test_hostile_requests import ATTACKS, Attack, battle
from tests.e2e.conftest import Site
from upweight.demo.server_process import ServerProcess

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Go on"}], "temperature": 0}
LONG: dict[str, Any] = {"prompt": "Go on", "max_tokens": 400, "ignore_eos": True}


@dataclass
class Asked:
    """A server with one job that waits for samples, and a client that holds its key."""

    site: Site
    job: str
    http: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json=body)

    def quiet(self) -> dict[str, Any]:
        """Statistics once nothing runs any more."""
        end = time.monotonic() + 10
        while (stats := self.http.get("/stats").json())["active_tasks"] + stats["waiting_queue"]:
            assert time.monotonic() < end, stats
            time.sleep(0.02)
        found: dict[str, Any] = stats
        return found

    def remembered(self) -> list[tuple[Any, ...]]:
        """What is stored of the completions so far, oldest first."""
        with contextlib.closing(sqlite3.connect(self.site.home / "store.sqlite3")) as store:
            columns = "key, logprobs, raw_logprobs, versions, temperature, filtered, settings"
            return store.execute(f"SELECT {columns} FROM completions ORDER BY seq").fetchall()


@pytest.fixture(scope="module")
def asked(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    home = tmp_path_factory.mktemp("server") / "home"
    site = Site(home, str(tiny_model_folder), ServerProcess(home))
    job = site.create()
    site.wait(job, "waiting_for_samples")
    key = {"Authorization": f"Bearer {site.server.key}"}
    with httpx.Client(base_url=site.server.url, headers=key, timeout=60) as client:
        yield Asked(site, job, client)
    site.server.stop()


def test_the_public_routes_and_those_of_the_job_are_one(asked: Asked) -> None:
    body = {**CHAT, "max_tokens": 8}
    prefix = f"/v1alpha1/fine_tuning/jobs/{asked.job}/inference/openai/v1"
    one, other = (asked.http.post(f"{base}/chat/completions", json=body).json() for base in ("/v1", prefix))
    assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
    message = asked.post("messages", **body).json()
    assert message["content"] == [{"type": "text", "text": one["choices"][0]["message"]["content"]}]
    stats = asked.quiet()
    assert stats["jobs"][asked.job]["total_tasks"] == stats["total_tasks"] >= 3
    assert len(stats["recent_tasks"]) >= 3
    assert f'upweight_engine_total_tasks{{job="{asked.job}"}}' in asked.http.get("/metrics").text


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        ("chat/completions", {**CHAT, "logprobs": True, "n": 2}, 2),
        ("completions", {"prompt": [[5, 6], [7]], "logprobs": 0, "n": 2, "stop": "e"}, 4),
    ],
)
def test_a_stream_is_stored_as_the_same_answer_is(asked: Asked, path: str, body: dict[str, Any], choices: int) -> None:
    body = {**body, "max_tokens": 8, "temperature": 1, "seed": 5, "return_token_ids": True}
    before = len(asked.remembered())
    for stream in (False, True):
        assert asked.post(path, **body, stream=stream).status_code == 200
    rows = asked.remembered()[before:]
    assert len(rows) == 2 * choices
    assert sorted(rows[:choices]) == sorted(rows[choices:])


def test_a_filtered_answer_is_stored_with_the_whole_distribution_at_its_temperature(asked: Asked) -> None:
    """As the trainer computes it: all tokens count, at the answer's own temperature."""
    drawn = {"temperature": 0.7, "top_p": 0.6, "presence_penalty": 0.5, "seed": 5}
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    ids = asked.post("completions", **body, **drawn).json()["choices"][0]["token_ids"]
    _, logprobs, stored, *_ = asked.remembered()[-1]
    scored = {**body, "prompt": [5, 6, 7, *ids], "max_tokens": 1, "temperature": 0.7, "prompt_logprobs": True}
    answer = asked.post("completions", **scored).json()
    expected = answer["choices"][0].get("prompt_logprobs", answer.get("prompt_logprobs"))[3:]
    np.testing.assert_allclose(np.frombuffer(stored, "<f4"), expected, atol=5e-5)
    assert np.abs(np.frombuffer(logprobs, "<f4") - expected).max() > 0.01


def test_a_client_that_leaves_frees_its_row(asked: Asked) -> None:
    assert asked.post("completions", **LONG).status_code == 200  # compiled from here on
    before = asked.quiet()["total_tokens"]
    with asked.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as left:
        next(left.iter_raw())
    streamed = asked.quiet()["total_tokens"] - before
    with pytest.raises(httpx.ReadTimeout):
        asked.http.post("/v1/completions", json=LONG, timeout=0.1)
    assert max(streamed, asked.quiet()["total_tokens"] - before - streamed) < 300


def test_refusals_say_why(asked: Asked) -> None:
    late = asked.post("completions", **LONG, timeout=0.05)
    assert late.status_code == 504
    assert "time limit of 0.05 s" in late.json()["error"]["message"]
    for path, form in (("completions", "param"), ("messages", "message")):
        prompt = {"prompt": "a"} if path == "completions" else CHAT
        refused = asked.post(path, **prompt, max_tokens=10**6)
        assert refused.status_code == 400
        assert form in refused.json()["error"]
        assert "max_tokens is 1000000" in refused.json()["detail"]


def test_nobody_else_notices_hostile_requests(asked: Asked) -> None:
    calm = asyncio.run(battle(asked.site.server.url, [], asked.http.headers, "/v1"))[1]

    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(attacks=st.lists(ATTACKS, min_size=1, max_size=6))
    def run(attacks: list[Attack]) -> None:
        statuses, answers = asyncio.run(battle(asked.site.server.url, attacks, asked.http.headers, "/v1"))
        assert answers == calm
        assert set(statuses) <= {200, 400, 404, 429, 504, None}
        asked.quiet()

    run()
    assert asked.http.get("/health").json() == {"status": "ok", "engines": 1}
