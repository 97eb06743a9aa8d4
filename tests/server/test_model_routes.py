"""Inference routes beside the job prefix: the model's name picks the job; statistics; the two error forms."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_harness import KEY, Running, Start

from upweight.server.api.stats import together

ROUTES = ("chat/completions", "completions", "messages")
BODY: dict[str, Any] = {"messages": [], "max_tokens": 1}


def ready(server: Running, **more: Any) -> str:
    job = server.create_job(**more)
    server.wait(job, lambda p: p["inference_version"] is not None)
    return job


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return server.http.post(f"/v1/{path}", json={**BODY, **body})


def message(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


@pytest.fixture
def server(start: Start) -> Running:
    return start(max_running=2)


def test_the_only_job_answers_by_any_of_its_names_and_without_one(server: Running) -> None:
    job = ready(server)
    for path in ROUTES:
        for model in ({}, {"model": None}, {"model": job}, {"model": server.model}, {"model": "model"}):
            assert post(server, path, **model).status_code == 200, (path, model)
    stream = post(server, "chat/completions", model=job, stream=True).text
    assert stream.endswith("data: [DONE]\n\n")


def test_an_unknown_model_is_refused_naming_what_is_served(server: Running) -> None:
    none = post(server, "chat/completions", model="x")
    assert none.status_code == 400
    assert message(none) == "model 'x' is not served here; served: nothing: create a job first"
    assert post(server, "chat/completions").status_code == 400
    job = ready(server)
    for path in ROUTES:
        unknown = post(server, path, model="x")
        assert unknown.status_code == 400
        assert f"model 'x' is not served here; served: {job} ({server.model})" in message(unknown)


def test_a_name_that_two_jobs_share_must_be_an_id(server: Running) -> None:
    jobs = [ready(server), ready(server)]
    shared = post(server, "completions", model=server.model)
    assert shared.status_code == 400
    assert all(job in message(shared) for job in jobs)
    missing = post(server, "completions")
    assert missing.status_code == 400
    assert message(missing).startswith("model is missing and several models are served")
    for job in jobs:
        assert post(server, "completions", model=job).status_code == 200
    assert server.http.post(f"/v1/fine_tuning/jobs/{jobs[0]}/cancel").status_code == 200
    assert post(server, "completions", model=server.model).status_code == 200  # one is left
    assert post(server, "completions", model=jobs[0]).status_code == 400


def test_models_are_listed_and_read(server: Running) -> None:
    job = ready(server)
    listed = server.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [job]
    assert server.http.get(f"/v1/models/{job}").json() == listed[0]
    assert server.http.get("/v1/models/model").json()["id"] == job
    assert {"tools", "json_schema", "prompt_logprobs"} <= set(listed[0]["capabilities"])
    assert server.http.get("/v1/models/x").status_code == 404
    assert server.http.get(server.rl(job, "inference/openai/v1/models/m")).json()["id"] == "m"


def test_errors_have_the_form_of_the_route(server: Running) -> None:
    job = ready(server)
    prefix = server.rl(job, "inference/openai/v1/")
    for base in ("/v1/", prefix):
        for path in ("chat/completions", "completions"):
            bad = server.http.post(base + path, content=b"{")
            assert bad.status_code == 400
            told = bad.json()
            assert told["detail"] == told["error"]["message"]
            assert told["error"]["type"] == "invalid_request_error"
        bad = server.http.post(base + "messages", content=b"[]")
        assert bad.status_code == 400
        assert bad.json()["type"] == "error"
        assert bad.json()["error"] == {"type": "invalid_request_error", "message": "the body must be a JSON object"}
    for model in (3, [], {}, True):
        assert message(post(server, "completions", model=model)).startswith("model is ")


def test_the_key_may_come_as_anthropic_clients_send_it(server: Running) -> None:
    ready(server)
    with httpx.Client(base_url=server.http.base_url) as stranger:
        assert stranger.post("/v1/messages", json=BODY, headers={"x-api-key": KEY}).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}):
            refused = stranger.post("/v1/messages", json=BODY, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
        assert stranger.get("/stats").status_code == stranger.get("/metrics").status_code == 401


def test_statistics_of_one_job_and_of_all(server: Running) -> None:
    first, second = ready(server), ready(server)
    one = server.http.get("/stats", params={"model": first}).json()
    assert (one["total_tasks"], one["total_tokens"], one["avg_ttft_ms"]) == (4, 12, 5.0)
    both = server.http.get("/stats").json()
    assert (both["total_tasks"], both["active_tasks"], len(both["recent_tasks"])) == (8, 0, 2)
    assert set(both["jobs"]) == {first, second}
    assert both["jobs"][first]["request_timeout"] == 900.0  # what the settings say, as the worker was told
    lines = server.http.get("/metrics").text.splitlines()
    assert f'upweight_engine_total_tokens{{job="{first}"}} 12.0' in lines
    assert f'upweight_engine_tokens_by_version{{job="{first}",version="0"}} 12.0' in lines


def test_means_are_weighted_by_tasks() -> None:
    one = {"total_tasks": 1, "avg_ttft_ms": 10.0, "recent_tasks": [1] * 100}
    two = {"total_tasks": 3, "avg_ttft_ms": 2.0, "avg_decode_tps": None, "recent_tasks": [2] * 100}
    told = together([one, two])
    assert (told["avg_ttft_ms"], told["avg_decode_tps"], told["total_tasks"]) == (4.0, 0.0, 4)
    assert told["recent_tasks"] == [1] * 28 + [2] * 100
    assert together([])["avg_ttft_ms"] == 0.0
