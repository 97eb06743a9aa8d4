"""The public inference routes over the whole way: API process, worker process, engine."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Site

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Go on"}], "temperature": 0}


LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


def quiet(client: httpx.Client) -> dict[str, Any]:
    """Statistics once nothing runs any more."""
    end = time.monotonic() + 10
    while (stats := client.get("/stats").json())["active_tasks"] + stats["waiting_queue"]:
        assert time.monotonic() < end, stats
        time.sleep(0.02)
    found: dict[str, Any] = stats
    return found


def remembered(site: Site) -> list[sqlite3.Row]:
    """What is stored of the completions so far, oldest first."""
    with contextlib.closing(sqlite3.connect(site.home / "store.sqlite3")) as store:
        store.row_factory = sqlite3.Row
        columns = "key, logprobs, raw_logprobs, versions, temperature, filtered, settings"
        return store.execute(f"SELECT {columns} FROM completions ORDER BY seq").fetchall()


def test_the_public_routes_and_those_of_the_job_are_one(site: Site) -> None:
    job_id = site.create()
    site.wait(job_id, "waiting_for_samples")
    key = {"Authorization": f"Bearer {site.server.key}"}
    prefix = f"/v1alpha1/fine_tuning/jobs/{job_id}/inference/openai/v1"
    with httpx.Client(base_url=site.server.url, headers=key, timeout=60) as client:
        body = {**CHAT, "max_tokens": 8}
        one, other = (client.post(f"{base}/chat/completions", json=body).json() for base in ("/v1", prefix))
        assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
        told = {**body, "temperature": 1, "seed": 5, "n": 2, "logprobs": True, "return_token_ids": True}
        text = {**told, "prompt": [[5, 6], [7]], "logprobs": 0}
        del text["messages"]
        for path, asked in (("chat/completions", told), ("completions", text)):
            counts = [len(remembered(site))]
            for stream in (False, True):
                assert client.post(f"/v1/{path}", json={**asked, "stream": stream}).status_code == 200
                counts.append(len(remembered(site)))
            rows = [tuple(row) for row in remembered(site)]
            whole, streamed = rows[counts[0] : counts[1]], rows[counts[1] :]
            assert len(whole) in (2, 4)
            assert sorted(whole) == sorted(streamed)
        message = client.post("/v1/messages", json=body).json()
        assert message["content"] == [{"type": "text", "text": one["choices"][0]["message"]["content"]}]

        with client.stream("POST", "/v1/chat/completions", json={**CHAT, **LONG, "stream": True}) as left:
            next(left.iter_raw())
        stats = quiet(client)
        assert stats["total_tokens"] < 300
        assert stats["jobs"][job_id]["total_tasks"] == stats["total_tasks"] >= 3
        assert len(stats["recent_tasks"]) >= 3
        assert f'upweight_engine_total_tasks{{job="{job_id}"}}' in client.get("/metrics").text

        before = stats["total_tokens"]
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"prompt": "Go on", **LONG}, timeout=0.1)
        assert quiet(client)["total_tokens"] - before < 300
        late = client.post("/v1/completions", json={"prompt": "Go on", **LONG, "timeout": 0.05})
        assert late.status_code == 504
        assert "time limit of 0.05 s" in late.json()["error"]["message"]
        assert client.get("/health").json() == {"status": "ok", "engines": 1}

        for path, form in (("completions", "param"), ("messages", "message")):
            refused = client.post(f"/v1/{path}", json={**CHAT, "prompt": "a", "max_tokens": 10**6})
            assert refused.status_code == 400
            assert form in refused.json()["error"]
