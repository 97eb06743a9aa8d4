"""Supervised and dpo jobs on the real server with the real worker and the openai client: what they learn, and that kills change nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Site
from upweight.demo.server_process import ServerProcess

QUESTIONS = ("sky", "the sea", "an eye", "what color?")
ANSWER = "blue"
ROWS = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": ANSWER}]} for q in QUESTIONS]
PAIRS = [{"prompt": question, "chosen": ANSWER, "rejected": "green or so"} for question in QUESTIONS]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("files") / "home"
    running = Site(home, str(tiny_model_folder), ServerProcess(home))
    yield running
    running.server.stop()


def start_job(site: Site, kind: str, rows: list[dict[str, Any]], **hyperparameters: Any) -> str:
    with openai.OpenAI(base_url=f"{site.server.url}/v1", api_key=site.server.key) as client:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file = client.files.create(file=("rows.jsonl", content), purpose="fine-tune")
        method: Any = {"type": kind, kind: {"hyperparameters": hyperparameters}}
        job = client.fine_tuning.jobs.create(
            model=site.model, training_file=file.id, validation_file=file.id, method=method
        )
        client.files.delete(file.id)
    return job.id


def answers(site: Site, job_id: str) -> list[str | None]:
    with openai.OpenAI(base_url=f"{site.server.url}/v1", api_key=site.server.key) as client:
        model = client.fine_tuning.jobs.retrieve(job_id).fine_tuned_model
        assert model is not None
        asked = [{"role": "user", "content": question} for question in QUESTIONS]
        made = [
            client.chat.completions.create(model=model, messages=[one], temperature=0, max_tokens=8)  # type: ignore[list-item]
            for one in asked
        ]
    return [one.choices[0].message.content for one in made]


def metric(job: dict[str, Any], name: str) -> list[float]:
    return [version["metrics"][name] for version in job["versions"][1:]]


def test_a_supervised_job_teaches_an_answer_that_is_then_given_greedily(place: Site) -> None:
    job_id = start_job(place, "supervised", ROWS, batch_size=4, n_epochs=20, learning_rate=2e-2)
    job = place.wait(job_id)
    losses = metric(job, "loss")
    assert losses[0] == pytest.approx(10.9, abs=0.2)  # a random model: log of the size of its vocabulary
    assert losses[-1] < 0.5
    assert metric(job, "token_accuracy")[-1] == 1.0
    measured = {v["version"]: v["metrics"]["valid_loss"] for v in job["versions"] if "valid_loss" in v["metrics"]}
    assert sorted(measured) == [10, 20]  # those with a checkpoint
    assert measured[20] == pytest.approx(losses[-1], abs=0.2)  # here the same rows
    tokens = metric(job, "num_tokens")
    assert set(tokens) == {8.0}  # four times the answer's token and that of the end of its turn
    assert job["ledger"]["trained"] == 80
    assert answers(place, job_id) == [ANSWER] * 4


def test_a_dpo_job_widens_the_margin_and_serves_what_it_learned(place: Site) -> None:
    settings = {"batch_size": 4, "n_epochs": 4, "learning_rate": 1e-2, "lora": {"rank": 4}}
    job = place.wait(start_job(place, "dpo", PAIRS, **settings))
    margins = metric(job, "margin")
    assert abs(margins[0]) < 1e-4  # policy and reference are the same model
    assert margins == sorted(margins)
    assert margins[-1] > 1
    assert job["versions"][-1]["metrics"]["valid_margin"] > 1
    assert metric(job, "loss")[0] == pytest.approx(0.6931, abs=1e-3)
    assert metric(job, "reward_accuracy")[-1] == 1.0
    assert len({version["fingerprint"] for version in job["versions"]}) == 5


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "rows"), [("supervised", ROWS), ("dpo", PAIRS)], ids=["supervised", "dpo"])
def test_kills_of_worker_and_server_change_no_bit_of_any_version(
    place: Site, kind: str, rows: list[dict[str, Any]]
) -> None:
    settings = {"batch_size": 3, "n_epochs": 6, "learning_rate": 1e-2}  # two batches an epoch
    undisturbed = place.wait(start_job(place, kind, rows, **settings))
    job_id = start_job(place, kind, rows, **settings)
    kill_at(place, job_id, 3, lambda now: now["worker"]["pid"])
    kill_at(place, job_id, 7, lambda _: place.server.pid)
    place.server.stop()
    place.restart()
    job = place.wait(job_id)
    told = [[(v["version"], v["fingerprint"]) for v in one["versions"]] for one in (undisturbed, job)]
    assert told[0] == told[1]
    assert metric(job, "loss") == metric(undisturbed, "loss")
    assert job["ledger"]["trained"] == 24


def kill_at(site: Site, job_id: str, version: int, pid: Any) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        now = site.progress(job_id)
        if (now["version"] or 0) >= version and now["worker"]:
            os.kill(pid(now), signal.SIGKILL)
            return
        time.sleep(0.05)
    raise AssertionError(f"version {version} did not come: {now}")
