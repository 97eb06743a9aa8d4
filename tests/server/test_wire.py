"""The HTTP contract: shapes, refusals, idempotency, keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from server_harness import KEY, Running, Start, sample


@pytest.fixture
def server(start: Start) -> Running:
    return start()


def method(**settings: Any) -> dict[str, Any]:
    return {"type": "reinforcement", "reinforcement": {"batch_size": 2, **settings}}


def create(server: Running, **body: Any) -> httpx.Response:
    return server.http.post("/v1/fine_tuning/jobs", json={"model": server.model, **body})


def test_every_route_but_health_needs_the_key(shared: Running) -> None:
    with httpx.Client(base_url=shared.http.base_url) as stranger:
        for path in ("/healthz", "/health", "/readyz", "/"):
            assert stranger.get(path).status_code == 200
        for path in ("/v1/fine_tuning/jobs", "/v1/models", shared.rl("x", "status")):
            assert stranger.get(path).status_code == 401
            wrong = stranger.get(path, headers={"Authorization": "Bearer wrong"})
            assert wrong.status_code == 401
            assert "not known" in wrong.json()["detail"]
            assert wrong.reason_phrase == wrong.json()["detail"]
        inference = stranger.get(shared.rl("x", "inference/openai/v1/models")).json()
        assert inference["error"]["type"] == "authentication_error"
        assert inference["detail"] == inference["error"]["message"]


def test_the_key_and_its_hash_are_in_no_answer_and_the_store_holds_no_key(server: Running) -> None:
    job = server.create_job()
    server.wait(job, lambda p: p["inference_version"] == 0)
    for path in (f"/v1/fine_tuning/jobs/{job}", server.rl(job, "progress"), f"/v1/fine_tuning/jobs/{job}/events"):
        assert KEY not in server.http.get(path).text
    for file in server.home.rglob("*"):
        if file.is_file() and file.name != "api_key":
            assert KEY.encode() not in file.read_bytes(), file


def test_a_new_job_is_readable_for_the_public_client(shared: Running) -> None:
    answer = create(shared, method=method(num_batches=3), suffix="mine", tags=["a"], seed=7, colour="red").json()
    assert answer["object"] == "fine_tuning.job"
    assert answer["status"] in ("queued", "running")
    assert answer["method"] is None
    assert answer["training_file"] == ""
    assert (answer["result_files"], answer["organization_id"], answer["seed"]) == ([], "", 7)
    assert answer["training_method"]["reinforcement"]["num_batches"] == 3
    assert answer["batch_size"] == 2
    assert answer["colour"] == "red"  # kept, without effect
    assert shared.http.get(f"/v1/fine_tuning/jobs/{answer['id']}").json()["colour"] == "red"
    events = shared.http.get(f"/v1/fine_tuning/jobs/{answer['id']}/events", params={"limit": 100}).json()["data"]
    assert [event["level"] for event in events if "'colour' was ignored" in event["message"]] == ["warn"]


def test_unknown_fields_replace_no_known_ones(shared: Running) -> None:
    answer = create(shared, method=method(), id="mine", status="succeeded", batch_size=99, job_status="x").json()
    assert answer["id"].startswith("ftjob-")
    assert (answer["status"], answer["batch_size"]) in (("queued", 2), ("running", 2))
    assert answer["job_status"] != "x"


def test_requests_may_call_the_model_by_its_names(server: Running) -> None:
    job = server.create_job()
    server.wait(job, lambda p: p["inference_version"] == 0)
    models = server.http.get(server.rl(job, "inference/openai/v1/models")).json()["data"]
    assert [model["id"] for model in models] == [server.model, Path(server.model).name, job]


def test_the_method_may_lie_in_extra_body(shared: Running) -> None:
    answer = create(shared, training_file="", extra_body={"method": method()}).json()
    assert answer["training_method"]["reinforcement"]["batch_size"] == 2
    differ = create(shared, method=method(), extra_body={"method": method(seed=1)})
    assert differ.status_code == 422


@pytest.mark.parametrize(
    ("body", "loc", "words"),
    [
        ({"method": method(learning_rat=1)}, "learning_rat", "learning_rate"),
        ({"method": {"type": "spec-draft", "spec_draft": {}}}, "type", "offered: reinforcement, supervised, dpo"),
        ({}, "method", "method is missing"),
        ({"model": "nowhere", "method": method()}, "model", "not on this machine"),
        ({"model": 3, "method": method()}, "model", "name or folder"),
    ],
)
def test_refused_creations(shared: Running, body: dict[str, Any], loc: str, words: str) -> None:
    before = len(shared.http.get("/v1/fine_tuning/jobs", params={"limit": 100}).json()["data"])
    answer = create(shared, **body)
    assert answer.status_code == 422
    problem = answer.json()["detail"][0]
    assert loc in problem["loc"]
    assert words in problem["msg"]
    assert len(shared.http.get("/v1/fine_tuning/jobs", params={"limit": 100}).json()["data"]) == before


def test_a_job_that_does_not_fit_on_the_disk_is_refused(start: Start) -> None:
    server = start(disk_budget_gb=1e-6)
    answer = create(server, method=method())
    assert answer.status_code == 422
    assert "UPWEIGHT_DISK_BUDGET_GB" in answer.json()["detail"]
    assert "keep_checkpoints" in answer.json()["detail"]


def test_a_quantised_model_is_counted_as_what_it_becomes(start: Start) -> None:
    """1 MB of GGUF: (3 · (3 + 1) for checkpoints + 1 for the export) · 6 MB = 78 MB. As a folder it would need 13 MB."""
    server = start(disk_budget_gb=0.05)
    gguf = Path(server.model) / "m.gguf"
    gguf.write_bytes(b"x" * 1_000_000)
    refused = server.http.post("/v1/fine_tuning/jobs", json={"model": str(gguf), "method": method()})
    assert refused.status_code == 422
    assert "needs about 0.08 GB" in refused.json()["detail"]
    assert server.http.post("/v1/fine_tuning/jobs", json={"model": server.model, "method": method()}).status_code == 200


def test_status_and_batches_have_the_shapes_of_the_contract(shared: Running) -> None:
    job = shared.create_job()
    status = shared.status(job)
    assert status["object"] == "fine_tuning.job.status"
    assert (status["total_batches"], status["filled_batches"], status["batch_size"]) == (2, 0, 2)
    assert shared.http.get(shared.rl(job, "batches/0")).status_code == 404
    batch = shared.http.post(shared.rl(job, "batches"), json={"index": 0}).json()
    assert batch == {
        "object": "fine_tuning.batch",
        "index": 0,
        "status": "filling",
        "sample_count": 0,
        "batch_size": 2,
    }
    assert shared.http.post(shared.rl(job, "batches"), json={"index": 0}).json() == batch
    assert shared.http.post(shared.rl(job, "batches"), json={"index": -1}).status_code == 422
    assert shared.http.post(shared.rl(job, "batches"), content=b"{").status_code == 422
    assert shared.http.get(shared.rl("ftjob-none", "status")).json() == {"detail": "job ftjob-none does not exist"}


def test_uploads_are_exactly_once_and_never_overfill(shared: Running) -> None:
    job = shared.create_job()
    shared.http.post(shared.rl(job, "batches"), json={"index": 0})
    assert shared.upload(job, 0, [sample("a")]).json()["sample_count"] == 1
    assert shared.upload(job, 0, [sample("a")]).json()["sample_count"] == 1
    changed = shared.upload(job, 0, [sample("a", normalized_reward=0.0)])
    assert changed.status_code == 422
    assert "'a'" in changed.json()["detail"][0]["msg"]
    full = shared.upload(job, 0, [sample("b"), sample("c")])
    assert full.status_code == 409
    assert (full.json()["sample_count"], full.json()["batch_size"]) == (1, 2)
    assert "nothing was stored" in full.json()["detail"]
    assert full.reason_phrase == full.json()["detail"]
    assert "x-reason" not in full.headers
    assert shared.upload(job, 0, [sample("a"), sample("b")]).json()["status"] == "filled"
    assert shared.status(job)["filled_batches"] == 1


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"logprobs": [0.0]}, "logprobs", "logprobs has 1 entries, token_ids has 6"),
        ({"mask": [1]}, "mask", "mask has 1 entries"),
        ({"mask": [0, 0, 0, 1, 1, 2]}, "mask", "0 and 1 only"),
        ({"token_ids": [], "logprobs": [], "mask": []}, "token_ids", "is empty"),
        ({"token_ids": [1, 2, 3, 4, 5, -6]}, "token_ids", "got -6"),
        ({"token_ids": [1, 2, 3, 4, 5, 2**40]}, "token_ids", "must lie in"),
        ({"normalized_reward": "x"}, "normalized_reward", "number"),
        ({"metadata": {"k": 1}}, "metadata", "string"),
        ({"debug_info": None}, "debug_info", "sample 'bad': debug_info: Input should be an object"),
    ],
)
def test_bad_samples_are_refused_by_id_and_field(
    shared: Running, changes: dict[str, Any], field: str, words: str
) -> None:
    job = shared.create_job()
    shared.http.post(shared.rl(job, "batches"), json={"index": 0})
    answer = shared.upload(job, 0, [sample("good"), sample("bad", **changes)])
    assert answer.status_code == 422
    problem = answer.json()["detail"][0]
    assert problem["loc"][:4] == ["body", "samples", 1, field]
    assert words in problem["msg"]
    assert shared.http.get(shared.rl(job, "batches/0")).json()["sample_count"] == 0


def test_an_id_that_is_longer_than_an_index_can_hold_is_refused(shared: Running) -> None:
    job = shared.create_job()
    shared.http.post(shared.rl(job, "batches"), json={"index": 0})
    answer = shared.upload(job, 0, [sample("s" * 257)])
    assert answer.status_code == 422
    assert "id has 257 characters, at most 256 are allowed" in answer.json()["detail"][0]["msg"]
    assert shared.upload(job, 0, [sample("s" * 256)]).status_code == 200


def test_uploads_that_are_no_uploads_are_refused(shared: Running) -> None:
    job = shared.create_job()
    shared.http.post(shared.rl(job, "batches"), json={"index": 0})
    for body in (b"", b"{", b"[]", b"{}", b'{"samples":3}', b'{"samples":[3]}', b'{"samples":[{"id":3}]}', b"null"):
        answer = shared.http.post(shared.rl(job, "batches/0/samples"), content=body)
        assert answer.status_code == 422, body
        assert answer.json()["detail"][0]["msg"], body


def test_numbers_that_are_not_finite_are_refused(shared: Running) -> None:
    job = shared.create_job()
    shared.http.post(shared.rl(job, "batches"), json={"index": 0})
    body = (
        '{"samples":[{"id":"n","token_ids":[1],"logprobs":[NaN],"mask":[1],"normalized_reward":Infinity,'
        '"metadata":{},"debug_info":{}}]}'
    )
    answer = shared.http.post(shared.rl(job, "batches/0/samples"), content=body)
    assert answer.status_code == 422
    assert [item["loc"][-1] for item in answer.json()["detail"]] == ["logprobs", "normalized_reward"]
    assert all("'n'" in item["msg"] for item in answer.json()["detail"])


def test_group_advantages_need_a_task_id(shared: Running) -> None:
    job = shared.create_job(advantage="group")
    shared.http.post(shared.rl(job, "batches"), json={"index": 0})
    answer = shared.upload(job, 0, [sample("a", debug_info={})])
    assert answer.status_code == 422
    assert "task_id" in answer.json()["detail"][0]["msg"]


def test_a_reason_phrase_is_one_line_of_ascii(shared: Running) -> None:
    name = "nö%00" + 400 * "x"
    missing = shared.http.get(f"/v1/fine_tuning/jobs/{name}")
    assert missing.json()["detail"].startswith("job nö")
    assert missing.reason_phrase.startswith("job n??xxx")
    assert len(missing.reason_phrase) == 300
    for length in range(280, 300):  # wherever it is cut, no space stands at its end
        cut = shared.http.get(f"/v1/fine_tuning/jobs/{'x' * length} does not exist")
        assert cut.status_code == 404


def test_a_body_that_is_too_large_is_413(start: Start) -> None:
    server = start(max_body_mb=1)
    job = server.create_job()
    answer = server.http.post(server.rl(job, "batches/0/samples"), content=b" " * 1_100_000)
    assert answer.status_code == 413
    assert "1 MB" in answer.json()["detail"]
    asked = server.http.post("/v1/messages", content=b" " * 1_100_000)
    assert asked.status_code == 413
    assert asked.json()["error"]["type"] == "request_too_large"


def test_a_repeated_post_makes_one_job(shared: Running) -> None:
    body = {"model": shared.model, "method": method(), "suffix": "only once"}
    answers = [
        shared.http.post("/v1/fine_tuning/jobs", json=body, headers={"Idempotency-Key": "k1"}).json() for _ in range(3)
    ]
    assert answers[0] == answers[1] == answers[2]
    assert shared.http.get("/v1/fine_tuning/jobs").text.count('"suffix":"only once"') == 1
    long = shared.http.post("/v1/fine_tuning/jobs", json=body, headers={"Idempotency-Key": "k" * 256})
    assert (long.status_code, long.json()["detail"]) == (
        400,
        "Idempotency-Key has 256 characters, at most 255 are allowed",
    )
    other = shared.http.post("/v1/fine_tuning/jobs", json={**body, "seed": 1}, headers={"Idempotency-Key": "k1"})
    assert other.status_code == 422


def test_a_repeated_creation_is_answered_also_when_the_model_is_gone(server: Running) -> None:
    model = server.home / "copy"
    model.mkdir()
    body, once = {"model": str(model), "method": method()}, {"Idempotency-Key": "gone"}
    first = server.http.post("/v1/fine_tuning/jobs", json=body, headers=once)
    model.rmdir()
    again = server.http.post("/v1/fine_tuning/jobs", json=body, headers=once)
    assert (again.status_code, again.json()) == (200, first.json())


def test_lists_are_newest_first_with_a_cursor(server: Running) -> None:
    made = [server.create_job() for _ in range(3)]
    first = server.http.get("/v1/fine_tuning/jobs", params={"limit": 2}).json()
    assert [job["id"] for job in first["data"]] == [made[2], made[1]]
    assert first["has_more"] is True
    rest = server.http.get("/v1/fine_tuning/jobs", params={"limit": 2, "after": made[1]}).json()
    assert ([job["id"] for job in rest["data"]], rest["has_more"]) == ([made[0]], False)
    assert server.http.get("/v1/fine_tuning/jobs", params={"limit": 0}).status_code == 422
    events = server.http.get(f"/v1/fine_tuning/jobs/{made[0]}/events", params={"limit": 1}).json()
    older = server.http.get(f"/v1/fine_tuning/jobs/{made[0]}/events", params={"after": events["data"][0]["id"]}).json()
    assert events["data"][0]["id"] not in [event["id"] for event in older["data"]]


def test_checkpoints_are_listed_and_read(server: Running) -> None:
    job = server.create_job(num_batches=2, checkpoint_every=1, keep_checkpoints=1)
    for index in (0, 1):
        server.fill(job, index)
    server.wait_status(job, "succeeded")
    listed = server.http.get(f"/v1/fine_tuning/jobs/{job}/checkpoints").json()
    assert [item["step_number"] for item in listed["data"]] == [2]  # keep_checkpoints = 1
    item = listed["data"][0]
    assert item["result_files"] == []
    assert listed["first_id"] == listed["last_id"] == item["id"]
    single = server.http.get(f"/v1/fine_tuning/jobs/{job}/checkpoints/{item['id']}").json()
    assert "result_files" not in single
    assert single["metrics"] == {"step": 2.0, "train_loss": 0.5}
    assert len(list((server.home / "jobs" / job / "checkpoints").iterdir())) == 1
    assert server.http.get(f"/v1/fine_tuning/jobs/{job}/checkpoints/none").status_code == 404


def test_client_metrics_are_events_and_progress(shared: Running) -> None:
    job = shared.create_job()
    path = shared.rl(job, "metrics")
    answer = shared.http.post(path, json={"batch_index": 0, "metrics": {"eval": 0.25}})
    assert answer.json() == {"object": "fine_tuning.metrics"}
    assert shared.progress(job)["client_metrics"] == [{"batch_index": 0, "metrics": {"eval": 0.25}}]
    assert "batch 0: eval 0.25" in shared.events(job)
    assert shared.http.post(path, json={"batch_index": 0, "metrics": {"eval": "x"}}).status_code == 422


def test_the_reason_says_what_a_job_waits_for(server: Running) -> None:
    job = server.create_job()
    server.wait_status(job, "waiting_for_samples")
    server.http.post(server.rl(job, "batches"), json={"index": 0})
    server.upload(job, 0, [sample("a")])
    assert server.progress(job)["reason"] == "batch 0 holds 1 of 2 samples"
    assert server.status(job)["job_status"] == "waiting_for_samples"
    assert server.status(job)["reason"] == "batch 0 holds 1 of 2 samples"


def test_inference_streams_renders_and_passes_refusals_on(server: Running) -> None:
    job = server.create_job(num_batches=1)
    chat = server.rl(job, "inference/openai/v1/chat/completions")
    body = server.http.post(chat, json={"model": "m", "messages": [], "stream": True}).text
    assert body.count("data: ") == 4
    assert body.endswith("data: [DONE]\n\n")
    unknown = server.http.post(chat, json={"model": "unknown", "messages": []})
    assert unknown.status_code == 404
    assert unknown.json()["detail"] == unknown.json()["error"]["message"] == "no such model"
    assert server.http.post(server.rl(job, "render"), json={"messages": []}).json()["token_ids"] == [1, 2, 3]
    assert [m["id"] for m in server.http.get("/v1/models").json()["data"]] == [job]
    server.fill(job, 0)
    end = server.wait_status(job, "succeeded")
    assert end["ledger"]["unmatched"] == 0  # the streamed completion was put together and joined
