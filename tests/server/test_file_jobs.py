"""Jobs that train on a file, over HTTP, with the fake worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from server_harness import KEY, Running, Start, sample

from upweight.api_client import TokenFactory
from upweight.api_client.models.fine_tuning import SupervisedHParameters
from upweight.server.file_methods import Dpo, Supervised, parse_file_method
from upweight.server.methods import LARGEST
from upweight.server.refusals import Refusal

ROWS = [{"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "b"}]} for i in range(5)]
PAIRS = [{"prompt": f"{i}", "chosen": "yes", "rejected": "no"} for i in range(5)]

SUPERVISED = {
    "batch_size": 8,
    "learning_rate": 1e-5,
    "n_epochs": 3,
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "packing": True,
    "max_grad_norm": 1.0,
    "context_length": 8192,
    "lora": False,
    "lora_r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
}
DPO = {
    "beta": 0.1,
    "loss_type": "sigmoid",
    "label_smoothing": 0.0,
    "length_normalized": False,
    "n_epochs": 1,
    "batch_size": 8,
    "learning_rate": 5e-6,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "lora": None,
    "checkpoint_every": 10,
    "keep_checkpoints": 3,
    "budget": None,
    "seed": 0,
}


def upload(server: Running, rows: list[Any], purpose: str = "fine-tune") -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows)
    form = {"files": {"file": ("rows.jsonl", content.encode())}, "data": {"purpose": purpose}}
    return server.http.post("/v1/files", **form).json()["id"]


def method(kind: str, **hyperparameters: Any) -> dict[str, Any]:
    return {"type": kind, kind: {"hyperparameters": hyperparameters}}


def create(server: Running, file_id: str | None, **fields: Any) -> Any:
    return server.http.post("/v1/fine_tuning/jobs", json={"model": server.model, "training_file": file_id, **fields})


# The method objects


def test_names_and_defaults_are_frozen() -> None:
    assert Supervised().model_dump() == SUPERVISED == SupervisedHParameters().model_dump()
    assert Dpo().model_dump() == DPO


@pytest.mark.parametrize(
    ("kind", "hyperparameters", "words"),
    [
        ("supervised", {"batch_sise": 1}, ["unknown key 'batch_sise'", "'batch_size'"]),
        ("supervised", {"batch_size": 65}, ["batch_size = 65", "64"]),
        ("supervised", {"n_epochs": 21}, ["n_epochs = 21", "20"]),
        ("supervised", {"warmup_ratio": 1.5}, ["warmup_ratio = 1.5", "1"]),
        ("supervised", {"max_grad_norm": 0}, ["max_grad_norm = 0", "greater than 0"]),
        ("supervised", {"context_length": 131073}, ["context_length = 131073", "131072"]),
        ("supervised", {"lora_r": 4}, ["lora_r = 4", "8"]),
        ("supervised", {"lora_dropout": 0.1}, ["lora_dropout = 0.1 has no effect without lora"]),
        ("supervised", {"lora": True, "lora_dropout": 1.1}, ["lora_dropout = 1.1", "less than or equal to 1"]),
        ("supervised", {"seed": 1}, ["unknown key 'seed'"]),
        ("dpo", {"bta": 1}, ["unknown key 'bta'", "'beta'"]),
        ("dpo", {"beta": 0}, ["beta = 0", "greater than 0"]),
        ("dpo", {"label_smoothing": 0.5}, ["label_smoothing = 0.5", "less than 0.5"]),
        ("dpo", {"loss_type": "kto"}, ["loss_type = 'kto'", "'sigmoid'"]),
        ("dpo", {"loss_type": "ipo", "label_smoothing": 0.1}, ["label_smoothing = 0.1 has no effect with loss_type 'ipo'"]),
        ("dpo", {"loss_type": "simpo", "length_normalized": True}, ["length_normalized has no effect"]),
        ("dpo", {"lora": {"rnk": 1}}, ["unknown key 'rnk'", "'rank'"]),
        ("dpo", {"lora": {"targets": "attn"}}, ["lora.targets 'attn' is not offered"]),
        ("dpo", {"budget": {"max_tokens": 0}}, ["budget.max_tokens = 0"]),
    ],
)  # fmt: skip
def test_refusals_name_field_value_and_remedy(kind: str, hyperparameters: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        parse_file_method(method(kind, **hyperparameters), None)
    assert refused.value.status == 422
    for word in words:
        assert word in refused.value.text


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"type": "dpo", "supervised": {}}, "unknown key 'supervised'; the nearest known one is"),
        ({"type": "dpo", "dpo": []}, "dpo must be an object"),
        ({"type": "dpo", "dpo": {"beta": 1}}, "unknown key 'beta'; the nearest known one is 'hyperparameters'"),
    ],
)
def test_other_method_objects_are_refused(given: dict[str, Any], word: str) -> None:
    with pytest.raises(Refusal, match=word):
        parse_file_method(given, None)


def test_more_batches_than_can_be_counted_are_refused() -> None:
    most = parse_file_method(method("dpo", batch_size=1, n_epochs=LARGEST), None)
    assert most.settings(1)["num_batches"] == LARGEST
    with pytest.raises(Refusal, match=f"n_epochs = {LARGEST} makes {3 * LARGEST} batches of 3 rows") as refused:
        most.settings(3)
    assert refused.value.status == 422


def test_settings_of_a_job_say_all_that_it_trains_with() -> None:
    made = parse_file_method(method("supervised", batch_size=2, warmup_ratio=0.5, lora=True, lora_r=16), 7).settings(5)
    assert (made["num_batches"], made["rows"], made["warmup_steps"], made["seed"]) == (9, 5, 4, 7)
    assert made["lora"] == {"rank": 16, "alpha": 8.0, "targets": "all-linear"}
    assert (made["checkpoint_every"], made["keep_checkpoints"], made["budget"], made["adam_b2"]) == (10, 3, None, 0.95)
    assert parse_file_method(method("dpo", seed=3), 7).settings(1)["seed"] == 3


# Creation


def test_the_openai_client_creates_a_supervised_job_that_is_trained_to_its_end(start: Start) -> None:
    server = start()
    with openai.OpenAI(base_url=f"{server.http.base_url}".rstrip("/") + "/v1", api_key=KEY, max_retries=0) as client:
        file = client.files.create(file=("a.jsonl", "".join(json.dumps(r) + "\n" for r in ROWS)), purpose="fine-tune")
        job = client.fine_tuning.jobs.create(
            model=server.model,
            training_file=file.id,
            seed=7,
            method=method("supervised", batch_size=2, n_epochs=2),  # type: ignore[arg-type]
        )
        assert (job.training_file, job.seed, job.fine_tuned_model) == (file.id, 7, None)
        assert job.method is not None
        assert job.method.type == "supervised"
        end = server.wait_status(job.id, "succeeded")
        assert [v["version"] for v in end["versions"]] == list(range(7))
        assert [v["metrics"]["samples"] for v in end["versions"][1:]] == [2, 2, 1] * 2
        assert (end["ledger"]["accepted"], end["ledger"]["trained"], end["ledger"]["not_yet_trained"]) == (10, 10, 0)
        done = client.fine_tuning.jobs.retrieve(job.id)
        assert (done.status, done.trained_tokens, done.fine_tuned_model) == ("succeeded", 30, job.id)
        steps = [event.data for event in client.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"]
        assert [step["loss"] for step in steps] == [0.5] * 6  # type: ignore[index]
        assert [c.step_number for c in client.fine_tuning.jobs.checkpoints.list(job.id)] == [6]


def test_a_dpo_job_goes_on_after_its_file_is_deleted_its_worker_dies_and_the_server_is_started_again(
    start: Start,
) -> None:
    server = start({"die_in_training": [1], "train_seconds": 0.2})
    file = upload(server, PAIRS)
    made = create(server, file, method=method("dpo", batch_size=2, checkpoint_every=1, n_epochs=2)).json()
    assert server.http.delete(f"/v1/files/{file}").json()["deleted"]
    assert made["method"] is None  # a public client knows no such method
    assert made["training_method"] == method("dpo", **{**DPO, "batch_size": 2, "checkpoint_every": 1, "n_epochs": 2})
    server.wait(made["id"], lambda p: p["version"] is not None and p["version"] >= 3)
    server.stop()
    again = start({"train_seconds": 0})
    end = again.wait_status(made["id"], "succeeded")
    assert end["version"] == 6
    assert any("end of its log" in message for message in again.events(made["id"]))


def test_a_file_job_takes_no_samples_and_can_be_cancelled(start: Start) -> None:
    server = start({"train_seconds": 0.5})
    job = create(server, upload(server, PAIRS), method=method("dpo", batch_size=1, n_epochs=50)).json()["id"]
    server.wait(job, lambda p: p["version"] is not None)
    answer = server.http.post(server.rl(job, "batches"), json={"index": 0})
    assert (answer.status_code, answer.json()["detail"]) == (
        409,
        f"job {job} is of type dpo: it trains on its file and takes no samples",
    )
    assert server.upload(job, 0, [sample("x")]).status_code == 404
    waiting = server.http.get(server.rl(job, "waiting")).json()
    assert waiting["state"] == "working"
    assert [part["text"] for part in waiting["parts"]][:2] == [
        "None are needed: the job trains on a file",
        "All 250 batches are in the job's file",
    ]
    status = server.status(job)
    assert (status["total_batches"], status["batch_size"]) == (250, 1)
    assert server.http.post(f"/v1/fine_tuning/jobs/{job}/cancel").json()["status"] == "cancelled"


def test_a_file_job_is_paused_and_resumed(start: Start) -> None:
    server = start({"train_seconds": 0.1})
    job = create(server, upload(server, PAIRS), method=method("dpo", batch_size=1, n_epochs=2)).json()["id"]
    server.wait(job, lambda p: (p["version"] or 0) >= 2)
    assert server.http.post(f"/v1/fine_tuning/jobs/{job}/pause").status_code == 200
    assert server.status(job)["job_status"] == "paused"
    assert server.http.post(f"/v1/fine_tuning/jobs/{job}/resume").status_code == 200
    assert server.wait_status(job, "succeeded")["version"] == 10


def test_a_budget_ends_a_dpo_job_as_succeeded(start: Start) -> None:
    server = start()
    job = create(server, upload(server, PAIRS), method=method("dpo", batch_size=1, budget={"max_samples": 3})).json()
    end = server.wait_status(job["id"], "succeeded")
    assert (end["version"], end["ledger"]["not_yet_trained"]) == (3, 2)
    assert "budget max_samples = 3" in end["reason"]


def test_a_file_without_a_method_is_a_supervised_job_and_the_public_client_reads_it(shared: Running) -> None:
    file = upload(shared, ROWS)
    with TokenFactory(f"{shared.http.base_url}".rstrip("/"), KEY) as client:
        given = SupervisedHParameters(batch_size=4, n_epochs=1)
        job = client.v1.fine_tuning.jobs.create(model=shared.model, training_file=file, hyperparameters=given)
        assert job.hyperparameters == given
        assert job.method is not None
        assert job.model_dump()["training_method"] == method("supervised", **given.model_dump())
    different = method("supervised", batch_size=2)
    answer = create(shared, file, method=different, hyperparameters={"batch_size": 4})
    assert answer.json()["detail"][0]["msg"] == "hyperparameters and those of the method differ; send one of them"


def test_notes_of_a_file_are_events_of_its_job(shared: Running) -> None:
    content = b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\r\n"
    form = {"files": {"file": ("rows.jsonl", content)}, "data": {"purpose": "fine-tune"}}
    file = shared.http.post("/v1/files", **form).json()["id"]
    job = create(shared, file, method=method("supervised")).json()["id"]
    events = shared.events(job)
    assert any("byte order mark" in message for message in events)
    assert any("CRLF" in message for message in events)


def test_a_validation_file_is_checked_and_kept_too(shared: Running) -> None:
    file, held_out = upload(shared, ROWS), upload(shared, ROWS[:2])
    made = create(shared, file, validation_file=held_out, method=method("supervised")).json()
    assert made["validation_file"] == held_out
    copies = {path.name for path in (shared.home / "jobs" / made["id"]).iterdir()}
    assert copies == {"training.jsonl", "validation.jsonl"}
    wrong = create(shared, file, validation_file=upload(shared, PAIRS), method=method("supervised"))
    (first, *_) = wrong.json()["detail"]
    assert first["loc"][:2] == ["body", "validation_file"]
    assert first["msg"].startswith("line 1: messages: is missing")
    missing = create(shared, file, validation_file="file-none", method=method("supervised"))
    assert missing.json()["detail"][0]["msg"] == "validation_file: file 'file-none' does not exist"


def folders(server: Running) -> set[str]:
    return {path.name for path in Path(server.home, "jobs").iterdir()}


def test_files_that_cannot_be_trained_on_are_refused_in_one_line(shared: Running) -> None:
    good, before = upload(shared, ROWS), folders(shared)
    deleted = upload(shared, ROWS)
    shared.http.delete(f"/v1/files/{deleted}")
    gone = upload(shared, ROWS)
    (shared.home / "files" / gone).unlink()
    cases = [
        (None, "training_file is missing: a dpo job needs the id of an uploaded file"),
        ("file-none", "training_file: file 'file-none' does not exist"),
        (deleted, f"training_file: file {deleted} was deleted; upload it again"),
        (gone, f"training_file: file {gone} was deleted; upload it again"),
        (upload(shared, PAIRS, "batch"), "has purpose 'batch', 'fine-tune' is needed"),
        (good, "line 1: input: is missing; the line holds 'messages'"),
    ]
    for file, words in cases:
        answer = create(shared, file, method=method("dpo"))
        assert answer.status_code == 422
        assert words in answer.json()["detail"][0]["msg"]
        assert words in answer.json()["error"]["message"]  # what the openai client shows
    assert folders(shared) == before


def test_a_context_below_the_contracts_is_for_models_that_have_less(shared: Running, tiny_model_folder: Path) -> None:
    file, small = upload(shared, ROWS), method("supervised", context_length=256)
    made = create(shared, file, method=small, model=str(tiny_model_folder))
    assert made.status_code == 200
    # What the contract's own model of hyperparameters cannot hold is left out of its fields.
    assert (made.json()["hyperparameters"], made.json()["method"]) == (None, None)
    larger = shared.home / "larger"
    larger.mkdir()
    config = json.loads((tiny_model_folder / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (larger / "config.json").write_text(json.dumps(config))
    (larger / "model.safetensors").write_bytes(b"")
    refused = create(shared, file, method=small, model=str(larger))
    assert (
        "context_length = 256: less than 8192 is for models with a smaller context, this one has a context of 8192"
        in refused.text
    )


def test_a_repeated_creation_makes_one_job(shared: Running) -> None:
    body = {"model": shared.model, "training_file": upload(shared, ROWS), "method": method("supervised")}
    headers = {"Idempotency-Key": "job-1"}
    one, two = (shared.http.post("/v1/fine_tuning/jobs", json=body, headers=headers).json() for _ in range(2))
    assert one == two
