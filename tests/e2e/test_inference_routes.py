"""The public inference routes over the whole way: API process, worker process, engine."""

from __future__ import annotations

import time
from typing import Any

import httpx

from tests.e2e.conftest import Site

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Go on"}], "temperature": 0}


def test_the_public_routes_and_those_of_the_job_are_one(site: Site) -> None:
    job_id = site.create()
    site.wait(job_id, "waiting_for_samples")
    key = {"Authorization": f"Bearer {site.server.key}"}
    prefix = f"/v1alpha1/fine_tuning/jobs/{job_id}/inference/openai/v1"
    with httpx.Client(base_url=site.server.url, headers=key, timeout=60) as client:
        body = {**CHAT, "max_tokens": 8}
        one, other = (client.post(f"{base}/chat/completions", json=body).json() for base in ("/v1", prefix))
        assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
        message = client.post("/v1/messages", json=body).json()
        assert message["content"] == [{"type": "text", "text": one["choices"][0]["message"]["content"]}]

        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 400, "stream": True}) as left:
            next(left.iter_raw())
        end = time.monotonic() + 10
        while (stats := client.get("/stats").json())["active_tasks"] + stats["waiting_queue"]:
            assert time.monotonic() < end, stats
            time.sleep(0.02)
        assert stats["total_tokens"] < 300
        assert stats["jobs"][job_id]["total_tasks"] == stats["total_tasks"] >= 3
        assert len(stats["recent_tasks"]) >= 3
        assert f'upweight_engine_total_tasks{{job="{job_id}"}}' in client.get("/metrics").text

        for path, form in (("completions", "param"), ("messages", "message")):
            refused = client.post(f"/v1/{path}", json={**CHAT, "prompt": "a", "max_tokens": 10**6})
            assert refused.status_code == 400
            assert form in refused.json()["error"]
