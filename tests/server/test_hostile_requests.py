"""Values at and beyond the edge of what JSON can say: refused with field and value, never a 500, and nothing else is disturbed."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
from server_harness import KEY, Running, Start, sample

JOBS = "/v1/fine_tuning/jobs"
HUGE = 10**400


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("events?after=ftevent-9223372036854775808", "after"),
        ("checkpoints/ftckpt-{job}-9223372036854775808", "checkpoint"),
        ("checkpoints?limit=9223372036854775808", "limit = '9223372036854775808'"),
    ],
)
def test_numbers_that_no_column_holds(shared: Running, path: str, named: str) -> None:
    job = shared.create_job()
    answer = shared.http.get(f"{JOBS}/{job}/" + path.format(job=job))
    assert 400 <= answer.status_code < 500, answer.text
    assert named in answer.text


def test_progress_since_a_number_that_no_column_holds(shared: Running) -> None:
    answer = shared.http.get(shared.rl(shared.create_job(), "progress?since=9223372036854775808"))
    assert answer.status_code == 422
    assert "since = '9223372036854775808'" in answer.json()["detail"][0]["msg"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"batch_size": 2**63}, "batch_size"),
        ({"num_batches": 10**30}, "num_batches"),
        ({"keep_checkpoints": HUGE}, "keep_checkpoints"),
        ({"seed": 2**64}, "seed"),
        ({"lora": {"targets": "everything"}}, "targets"),
        ({"lora": {"targets": ["q"]}}, "targets"),
    ],
)
def test_settings_beyond_what_can_be_run(shared: Running, settings: dict[str, Any], field: str) -> None:
    method = {"type": "reinforcement", "reinforcement": {"batch_size": 2, **settings}}
    answer = shared.http.post(JOBS, json={"model": shared.model, "method": method})
    assert answer.status_code == 422
    assert field in answer.json()["detail"][0]["msg"]


def test_half_a_surrogate_pair_can_be_told_back(shared: Running) -> None:
    method = {"type": "reinforcement", "reinforcement": {"batch_size": 2}}
    body = json.dumps({"model": shared.model, "suffix": "\ud800", "method": method})
    answer = shared.http.post(JOBS, content=body)
    assert answer.status_code == 200
    assert json.loads(shared.http.get(f"{JOBS}/{answer.json()['id']}").content)["suffix"] == "\ud800"


@pytest.mark.parametrize("metrics", [{"\ud800": 1}, {"a": HUGE}, {"a": 1e300}, {"a": float("nan")}, {"a": True}])
def test_metrics_that_cannot_be_told(shared: Running, metrics: dict[str, Any]) -> None:
    body = json.dumps({"batch_index": 0, "metrics": metrics})
    assert shared.http.post(shared.rl(shared.create_job(), "metrics"), content=body).status_code == 422


def test_numbers_beyond_float32_are_refused_or_not_averaged(start: Start) -> None:
    server = start()
    job = server.create_job(num_batches=1)
    server.http.post(server.rl(job, "batches"), json={"index": 0})
    for change in ({"normalized_reward": 1e39}, {"logprobs": [0.0, 0.0, 0.0, -1e39, -1.0, -1.0]}):
        refused = server.upload(job, 0, [sample("a", **change)])
        assert refused.status_code == 422
        assert "1e+39" in refused.text
    for name, reward in (("a", "1e999"), ("b", str(HUGE))):
        body = json.dumps({"samples": [sample(name)]}).replace('"reward": 0.5', f'"reward": {reward}')
        assert server.http.post(server.rl(job, "batches/0/samples"), content=body).status_code == 200
    assert server.wait_status(job, "succeeded")["ledger"]["trained"] == 2


def test_a_client_that_goes_away_in_its_body_is_no_error_of_the_server(
    shared: Running, caplog: pytest.LogCaptureFixture
) -> None:
    url = shared.http.base_url
    head = f"POST {JOBS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 99\r\n\r\n" + '{"a'
    with socket.create_connection((url.host, url.port or 80)) as connection:
        connection.sendall(head.encode())
        time.sleep(0.2)
    time.sleep(0.3)
    assert shared.http.get("/healthz").status_code == 200
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", ["batches", "metrics", None])
def test_an_order_of_many_bytes_is_refused_unread(shared: Running, path: str | None) -> None:
    """Read, it would hold up whoever asks for a status meanwhile."""
    url = JOBS if path is None else shared.rl(shared.create_job(), path)
    answer = shared.http.post(url, content=b'{"x": "' + b"y" * 300_000 + b'"}')
    assert (answer.status_code, "larger than 256 KiB" in answer.text) == (413, True)


def test_more_metrics_than_anybody_reads(shared: Running) -> None:
    job = shared.create_job()
    url = shared.rl(job, "metrics")
    few = {f"score {number}": number for number in range(30)}
    assert shared.http.post(url, json={"batch_index": 0, "metrics": few}).status_code == 200
    assert shared.events(job)[-1].endswith("score 19 19, and 10 more")
    for metrics, told in (
        ({str(number): 1 for number in range(501)}, "metrics has 501 names, the limit is 500"),
        ({"n" * 251: 1}, "at most 250 printable characters"),
    ):
        answer = shared.http.post(url, json={"batch_index": 0, "metrics": metrics})
        assert (answer.status_code, told in answer.text) == (422, True)


def test_what_is_no_route_says_what_there_is(shared: Running) -> None:
    missing = shared.http.get("/v2/jobs")
    told = "GET '/v2/jobs' is no route of this server; GET /openapi.json lists them"
    assert (missing.status_code, missing.json()["detail"]) == (404, told)
    wrong = shared.http.put("/v1/models")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
    assert wrong.json()["detail"] == "PUT '/v1/models' is not offered; allowed: GET"
    for path in ("/", "/healthz", "/health", "/readyz"):
        assert (shared.http.head(path).status_code, shared.http.head(path).content) == (200, b"")
