"""A job from its creation to its end, over HTTP, with the fake worker."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from server_harness import KEY, Start, sample


def test_a_job_is_trained_batch_by_batch_and_succeeds(start: Start) -> None:
    server = start()
    job = server.create_job()
    server.wait(job, lambda p: p["inference_version"] == 0)
    server.fill(job, 0)
    server.wait(job, lambda p: p["inference_version"] == 1)
    assert server.status(job)["filled_batches"] == 1
    server.fill(job, 1)
    end = server.wait_status(job, "succeeded")
    assert end["inference_version"] == 2
    assert [v["version"] for v in end["versions"]] == [0, 1, 2]
    assert end["versions"][2]["metrics"]["loss"] == 0.5
    assert end["versions"][2]["metrics"]["reward_mean"] == 0.5
    assert Path(end["weights"], "config.json").exists()
    answer = server.http.get(f"/v1/fine_tuning/jobs/{job}").json()
    assert (answer["status"], answer["trained_steps"], answer["total_steps"]) == ("succeeded", 2, 2)
    ledger = end["ledger"]
    assert (ledger["accepted"], ledger["trained"], ledger["unmatched"]) == (4, 4, 4)
    events = server.events(job)
    assert sum("checkpoint of version 2" in message for message in events) == 1
    assert sum("match no completion" in message for message in events) == 1
    assert "model loaded: version 0 is served" in events


def test_groups_of_one_are_told_once_by_a_job_that_compares_groups(start: Start) -> None:
    server = start()
    told = []
    for advantage in ("group", "given"):
        job = server.create_job(advantage=advantage, num_batches=3)
        for index in range(2):
            assert server.http.post(server.rl(job, "batches"), json={"index": index}).status_code == 200
            alone = [sample(f"{index}-{i}", debug_info={"task_id": f"{index}-{i}"}) for i in range(2)]
            assert server.upload(job, index, alone).status_code == 200
        server.fill(job, 2)
        server.wait_status(job, "succeeded")
        told.append(sum("the only ones of their task" in message for message in server.events(job)))
    assert told == [1, 0]


def test_prometheus_reads_the_numbers_of_jobs_and_engines(start: Start) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    server = start()
    job = server.create_job(num_batches=3)
    server.fill(job, 0)
    server.wait(job, lambda p: p["inference_version"] == 1 and p["job_status"] == "waiting_for_samples")
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert values["upweight_job_status", job, "waiting_for_samples"] == 1
    assert values["upweight_job_filled_batches", job] == values["upweight_job_inference_version", job] == 1
    assert values["upweight_job_metric", job, "reward_mean"] == 0.5
    assert values["upweight_engine_total_tokens", job] == values["upweight_engine_tokens_by_version", job, "0"] == 12


def test_a_served_completion_is_joined_to_the_uploaded_sample(start: Start) -> None:
    server = start()
    job = server.create_job(num_batches=1)
    asked = {"model": "m", "messages": [], "return_token_ids": True, "logprobs": True, "temperature": 0.7, "top_k": 5}
    answer = server.http.post(server.rl(job, "inference/openai/v1/chat/completions"), json=asked)
    assert answer.status_code == 200
    server.http.post(server.rl(job, "batches"), json={"index": 0})
    server.upload(job, 0, [sample("a"), sample("b", token_ids=[1, 1, 1, 1, 1, 1])])
    end = server.wait_status(job, "succeeded")
    metrics = end["versions"][1]["metrics"]
    assert (metrics["matched"], metrics["unmatched"], metrics["filtered"]) == (1.0, 1.0, 1.0)
    assert round(metrics["temperature"], 6) == 0.7
    assert (end["ledger"]["unmatched"], end["ledger"]["filtered"]) == (1, 1)


def test_a_finished_job_is_still_served_and_gives_way_to_the_next(start: Start) -> None:
    server = start()
    first = server.create_job(num_batches=1)
    server.fill(first, 0)
    server.wait_status(first, "succeeded")
    models = server.rl(first, "inference/openai/v1/models")
    assert server.http.get(models).status_code == 200
    second = server.create_job(num_batches=1)
    server.wait(second, lambda p: p["inference_version"] == 0)
    refused = server.http.get(models)
    assert refused.status_code == 503
    assert "places" in refused.json()["error"]["message"]
    server.fill(second, 0)
    server.wait_status(second, "succeeded")
    assert server.http.get(models).json()["data"][-1]["id"] == first


def test_a_finished_worker_that_holds_too_much_memory_is_stopped_and_started_again_when_asked(start: Start) -> None:
    server = start(idle_memory_gb=0.001)
    job = server.create_job(num_batches=1)
    server.fill(job, 0)
    # The event is the last thing that happens then.
    server.wait(job, lambda _: any("idle_memory_gb" in message for message in server.events(job)))
    stopped = server.progress(job)
    assert (stopped["job_status"], stopped["worker"], stopped["inference_version"]) == ("succeeded", None, 1)
    answer = server.http.post(server.rl(job, "inference/openai/v1/completions"), json={"prompt": "x"})
    assert answer.json()["inference_version"] == 1


def test_the_openai_client_reads_answers_streams_and_refusals(start: Start) -> None:
    server = start()
    job = server.create_job()
    prefix = f"{server.http.base_url}".rstrip("/") + server.rl(job, "inference/openai/v1")
    with openai.OpenAI(base_url=prefix, api_key=KEY, max_retries=0) as client:
        messages: list = [{"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(model="m", messages=messages, logprobs=True)
        assert whole.choices[0].message.content == "42"
        assert (whole.model_extra or {})["prompt_token_ids"] == [11, 12, 13]
        pieces = [
            p.choices[0].delta.content
            for p in client.chat.completions.create(model="m", messages=messages, stream=True)
        ]
        assert pieces == ["4", "4", "4"]
        with pytest.raises(openai.NotFoundError, match="no such model"):
            client.chat.completions.create(model="unknown", messages=messages)
        assert [model.id for model in client.models.list()] == [server.model, "model", job]
        server.http.post(f"/v1/fine_tuning/jobs/{job}/cancel")
        with pytest.raises(openai.ConflictError, match="cancelled"):
            client.chat.completions.create(model="m", messages=messages)


def test_jobs_queue_for_the_place_and_cancelling_frees_it(start: Start) -> None:
    server = start()
    first, second = server.create_job(), server.create_job()
    server.wait_status(first, "waiting_for_samples")
    waiting = server.wait(second, lambda p: first in p["reason"])
    assert waiting["job_status"] == "queued"
    assert server.http.post(f"/v1/fine_tuning/jobs/{first}/cancel").json()["status"] == "cancelled"
    server.wait_status(second, "waiting_for_samples")
    assert server.upload(first, 0, [sample("x")]).status_code == 404
    assert server.http.get(server.rl(first, "inference/openai/v1/models")).status_code == 409
