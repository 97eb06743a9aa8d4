"""A real server with a real worker: W&B and MLflow told and read back, a start from a checkpoint. They are extras, so this is soak:

uv run --extra local --extra wandb --extra mlflow --group tests pytest -n 0 -m soak tests/server/test_real_integrations.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from upweight.demo.server_process import ServerProcess

pytestmark = pytest.mark.soak

SECRET = "0123456789" * 4
ROWS = [
    {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "blue"}]}
    for q in ("sky", "the sea", "an eye", "what color?")
]
READ_WANDB = Path(__file__).parents[1].joinpath("wandb_rows.py").read_text()
READ_MLFLOW = """
import json, mlflow, sys
client = mlflow.MlflowClient(sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
rows = [[point.step, point.value] for point in client.get_metric_history(run.info.run_id, "loss")]
tags = run.data.tags
about = [run.info.run_name, run.info.status, tags["kind"], tags["upweight.job"], run.data.params["method"]]
print(json.dumps([*about, rows]))
"""


def read(code: str, argument: object) -> Any:
    done = subprocess.run([sys.executable, "-c", code, str(argument)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


class Place:
    def __init__(self, home: Path, model: str) -> None:
        self.home, self.model = home, model
        self.server = ServerProcess(home)

    def __call__(self, method: str, path: str, **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.server.key}"}
        return (
            httpx.request(method, self.server.url + path, headers=headers, timeout=30, **more).raise_for_status().json()
        )

    def create(self, *integrations: Any, n_epochs: int, **more: Any) -> str:
        content = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
        file = self("POST", "/v1/files", files={"file": ("rows.jsonl", content)}, data={"purpose": "fine-tune"})
        settings = {"batch_size": 4, "n_epochs": n_epochs, "learning_rate": 1e-2}
        body = {
            "model": self.model,
            "training_file": file["id"],
            "method": {"type": "supervised", "supervised": {"hyperparameters": settings}},
            "integrations": integrations,
            **more,
        }
        return self("POST", "/v1/fine_tuning/jobs", json=body)["id"]

    def progress(self, job: str) -> Any:
        return self("GET", f"/v1alpha1/fine_tuning/jobs/{job}/progress")

    def events(self, job: str) -> list[str]:
        found = self("GET", f"/v1/fine_tuning/jobs/{job}/events", params={"limit": 100})["data"]
        return [event["message"] for event in found]

    def until(self, job: str, condition: Any, seconds: float = 120) -> Any:
        end = time.monotonic() + seconds
        while not condition(now := self.progress(job)):
            assert now["job_status"] != "failed", now["reason"]
            assert time.monotonic() < end, (
                now["job_status"],
                now["reason"],
                self.events(job),
            )
            time.sleep(0.1)
        return now

    def told(self, job: str) -> Any:
        return lambda _: not (self.home / "jobs" / job / "integrations.json").exists()


@pytest.fixture
def place(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("UPWEIGHT_LOCAL_TRACKING", "1")
    monkeypatch.setenv("UPWEIGHT_RESTART_BACKOFF", "0")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = Place(tmp_path / "home", str(tiny_model_folder))
    yield made
    made.server.stop()


def test_both_trackers_have_every_step_once_after_kills_of_worker_and_server(place: Place, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/runs.db"
    wandb = {"type": "wandb", "wandb": {"project": "tests", "name": "first", "api_key": SECRET}}
    settings = {"tracking_uri": uri, "experiment_name": "tests", "run_name": "first", "tags": {"kind": "t"}}
    job = place.create(
        wandb, {"type": "mlflow", "mlflow": {**settings, "username": "u", "password": SECRET}}, n_epochs=20
    )
    now = place.until(job, lambda p: (p["version"] or 0) >= 3)
    os.kill(now["worker"]["pid"], signal.SIGKILL)
    place.until(job, lambda p: p["version"] >= 8)
    os.kill(place.server.pid, signal.SIGKILL)
    while place.server.ended() is None:
        time.sleep(0.05)
    place.server.stop()
    place.server = ServerProcess(place.home)
    done = place.until(job, lambda p: p["job_status"] == "succeeded")
    place.until(job, place.told(job))
    losses = [[version["version"], version["metrics"]["loss"]] for version in done["versions"][1:]]
    assert len(losses) == 20

    assert read(READ_MLFLOW, uri) == ["first", "FINISHED", "t", job, "supervised", losses]
    rows = read(READ_WANDB, place.home / "jobs" / job)
    assert [[int(row["version"]), row["loss"]] for row in rows if "loss" in row] == losses
    left = [file for file in place.home.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    assert left == []


def test_trackers_that_cannot_be_reached_are_told_in_the_events(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    job = place.create(
        {"type": "mlflow", "mlflow": {"tracking_uri": "http://127.0.0.1:9", "password": SECRET}}, n_epochs=4
    )
    place.until(job, lambda p: p["job_status"] == "succeeded")
    place.until(job, place.told(job))
    found = [event for event in place.events(job) if event.startswith("integration mlflow: ")]
    assert 1 <= len(found) <= 2
    assert all(SECRET not in event and "\n" not in event for event in found)


def test_a_job_starts_from_a_checkpoint_of_another(place: Place) -> None:
    first = place.create(n_epochs=2)
    prints = {v["version"]: v["fingerprint"] for v in place.until(first, _succeeded)["versions"]}
    second = place.create(n_epochs=1, from_checkpoint={"type": "ft", "job_id": first, "step": 2})
    versions = place.until(second, _succeeded)["versions"]
    assert versions[0]["fingerprint"] == prints[2]
    assert versions[1]["metrics"]["loss"] < 10.9  # of a random model


def _succeeded(progress: Any) -> bool:
    return progress["job_status"] == "succeeded"
