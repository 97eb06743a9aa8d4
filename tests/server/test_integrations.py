"""A job's metrics go to its trackers: every step once, whatever dies; no secret is told; no job waits or fails for it.

W&B is played by a module that writes down what it gets; `test_real_integrations` has the real packages.
"""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from server_harness import KEY, Running, Start

from upweight.api_client import TokenFactory
from upweight.api_client.models import fine_tuning
from upweight.errors import StoreError
from upweight.server.store import jobs

WANDB = """
import json, os, pathlib, time
PLACE = pathlib.Path(os.environ["FAKE_WANDB"])

def note(**content):
    with PLACE.open("a") as file:
        file.write(json.dumps(content) + "\\n")

class Run:
    def define_metric(self, *_, **__): ...
    def log(self, metrics, step):
        if (PLACE.parent / "dies").exists():
            (PLACE.parent / "dies").unlink()
            os._exit(9)
        time.sleep(1000 if (PLACE.parent / "hangs").exists() else 0)
        note(step=step, **metrics)
    def finish(self, exit_code): note(finished=exit_code)

def init(**given):
    if (PLACE.parent / "refuses").exists():
        raise RuntimeError("no server knows " + os.environ["WANDB_API_KEY"] + "\\nmore")
    note(id=given["id"], project=given["project"], resume=given["resume"], key=os.environ["WANDB_API_KEY"])
    return Run()
"""
MLFLOW = """
import json, os, pathlib

class MlflowClient:
    def __init__(self, uri):
        logins = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_TRACKING_")}
        (pathlib.Path(os.environ["FAKE_WANDB"]).parent / "logins").write_text(json.dumps([logins, os.environ["HOME"]]))
        raise RuntimeError(f"{uri} answered 500 != 200. Response body: 'what only the server may read'")
"""
SECRET = "very-secret-key"
ASKED = {"type": "wandb", "wandb": {"project": "p", "tags": ["a"], "api_key": SECRET}}
SHOWN = {"type": "wandb", "wandb": {"project": "p", "name": None, "entity": None, "tags": ["a"]}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "wandb.py").write_text(WANDB)
    (modules / "mlflow.py").write_text(MLFLOW)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("FAKE_WANDB", str(modules / "told"))
    return modules


def create(server: Running, *given: Any, **settings: Any) -> Any:
    method = {"type": "reinforcement", "reinforcement": {"batch_size": 2, "num_batches": 3, **settings}}
    body = {"model": server.model, "method": method, "integrations": list(given)}
    return server.http.post("/v1/fine_tuning/jobs", json=body)


def told(place: Path) -> list[dict[str, Any]]:
    file = place / "told"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until(condition: Any, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def steps(place: Path) -> list[float]:
    return [line["version"] for line in told(place) if "samples" in line]


def run_to_the_end(server: Running, job: str, batches: range) -> None:
    for index in batches:
        server.fill(job, index)
        server.wait(job, lambda p, index=index: p["inference_version"] == index + 1)


def places_of_secret(home: Path) -> list[Path]:
    return [file for file in home.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


def test_each_step_is_told_once_across_a_pause_and_the_secret_goes_with_the_end(start: Start, place: Path) -> None:
    server = start()
    made = create(server, ASKED)
    assert made.status_code == 200, made.text
    job = made.json()["id"]
    assert made.json()["integrations"] == [SHOWN]
    secrets = server.home / "jobs" / job / "integrations.json"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    server.fill(job, 0)
    until(lambda: steps(place) == [1])
    assert server.http.post(
        server.rl(job, "metrics"), json={"batch_index": 0, "metrics": {"held_out": 0.25}}
    ).is_success
    until(lambda: any("held_out" in line for line in told(place)))
    server.http.post(f"/v1/fine_tuning/jobs/{job}/pause")
    until(lambda: "finished" in told(place)[-1])
    assert secrets.exists()
    server.http.post(f"/v1/fine_tuning/jobs/{job}/resume")
    run_to_the_end(server, job, range(1, 3))
    server.wait_status(job, "succeeded")
    until(lambda: not secrets.exists())
    assert steps(place) == [1, 2, 3]
    assert [line["held_out"] for line in told(place) if "held_out" in line] == [0.25]
    runs = [line for line in told(place) if "id" in line]
    assert runs == [{"id": job, "project": "p", "resume": "allow", "key": SECRET}] * 2
    assert told(place)[-1] == {"finished": 0}
    numbers = [line["step"] for line in told(place) if "step" in line]
    assert numbers == sorted(set(numbers))
    assert places_of_secret(server.home) == []
    assert "integration wandb: metrics go to run " + job + " of project p" in server.events(job)
    assert server.http.get(f"/v1/fine_tuning/jobs/{job}").json()["integrations"] == [SHOWN]


def test_a_tracker_that_dies_is_told_the_rest_by_the_next(
    start: Start, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upweight.server.supervision.tracking.FIRST_PAUSE", 0.1)
    server = start()
    job = create(server, ASKED, num_batches=4).json()["id"]
    run_to_the_end(server, job, range(2))
    until(lambda: steps(place) == [1, 2])
    (place / "dies").touch()
    run_to_the_end(server, job, range(2, 3))
    until(lambda: steps(place) == [1, 2, 3])
    assert "integration wandb: its process ended; it is told again later" in server.events(job)


def test_a_server_that_starts_again_goes_on_with_the_run(start: Start, place: Path) -> None:
    server = start()
    job = create(server, ASKED).json()["id"]
    run_to_the_end(server, job, range(1))
    until(lambda: steps(place) == [1])
    server.stop()
    noted = server.home / "jobs" / job / "tracked-wandb.json"
    assert json.loads(noted.read_text()) == {"version": 1, "client": 0}
    server = start()
    run_to_the_end(server, job, range(1, 3))
    server.wait_status(job, "succeeded")
    until(lambda: steps(place) == [1, 2, 3] and not (server.home / "jobs" / job / "integrations.json").exists())


@pytest.mark.parametrize(("trouble", "words"), [("refuses", "no server knows ***"), ("hangs", "no answer within 1 s")])
def test_a_tracker_in_trouble_is_one_event_and_delays_nothing(
    start: Start, place: Path, trouble: str, words: str
) -> None:
    (place / trouble).touch()
    server = start(tracker_timeout=1.0 if trouble == "hangs" else 30.0)
    job = create(server, ASKED).json()["id"]
    run_to_the_end(server, job, range(3))
    server.wait_status(job, "succeeded")
    until(lambda: not (server.home / "jobs" / job / "integrations.json").exists())
    events = [event for event in server.events(job) if event.startswith("integration wandb: " + words)]
    assert 1 <= len(events) <= 2, server.events(job)  # while it ran, and at its end
    assert all("more" not in event and SECRET not in event for event in server.events(job))
    assert places_of_secret(server.home) == []


def test_a_store_that_does_not_answer_for_a_while_costs_no_step(
    start: Start, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upweight.server.supervision.tracking.FIRST_PAUSE", 0.1)
    read, broken = jobs.client_metrics_since, [True] * 3

    def sometimes(*given: Any) -> Any:
        if broken:
            broken.pop()
            raise StoreError("the store cannot be read")
        return read(*given)

    monkeypatch.setattr("upweight.server.store.jobs.client_metrics_since", sometimes)
    server = start()
    job = create(server, ASKED).json()["id"]
    run_to_the_end(server, job, range(3))
    server.wait_status(job, "succeeded")
    until(lambda: steps(place) == [1, 2, 3] and not broken)


def test_a_package_that_is_missing_is_told_once(start: Start, place: Path) -> None:
    (place / "wandb.py").write_text("raise ModuleNotFoundError('no wandb', name='wandb')")
    server = start()
    job = create(server, ASKED).json()["id"]
    run_to_the_end(server, job, range(3))
    server.wait_status(job, "succeeded")
    text = "integration wandb: wandb is not installed; run: pip install 'upweight[wandb]'"
    until(lambda: text in server.events(job))
    until(lambda: places_of_secret(server.home) == [])
    assert [event for event in server.events(job) if "integration" in event] == [text]


def test_both_clients_send_and_read_integrations(shared: Running) -> None:
    url, method = str(shared.http.base_url).rstrip("/"), {"type": "reinforcement", "reinforcement": {"batch_size": 2}}
    with TokenFactory(url, KEY) as ours:
        wandb = fine_tuning.WandbIntegrationRequest(wandb={"project": "p", "tags": ["a"], "api_key": SECRET})
        whole = mlflow(experiment_name=None, run_name=None, certificate_file="", username="u", password=SECRET)
        job = ours.v1.fine_tuning.jobs.create(
            model=shared.model, training_file="", integrations=[wandb, whole], extra_body={"method": method}
        )
        assert job.integrations is not None
        assert [one.type for one in job.integrations] == ["wandb", "mlflow"]
        assert SECRET not in repr(job)
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as theirs:
        # That API has no key: the server's own login is meant.
        asked: Any = {"model": shared.model, "training_file": "", "method": method}
        made = theirs.fine_tuning.jobs.create(**asked, integrations=[{"type": "wandb", "wandb": {"project": "p"}}])
        assert made.integrations is not None
        assert made.integrations[0].wandb.project == "p"
        for one in (job.id, made.id):
            assert theirs.fine_tuning.jobs.cancel(one).status == "cancelled"


def test_a_job_cancelled_in_the_queue_forgets_its_secret(shared: Running) -> None:
    job = create(shared, ASKED).json()["id"]
    assert places_of_secret(shared.home) != []
    shared.http.post(f"/v1/fine_tuning/jobs/{job}/cancel")
    assert places_of_secret(shared.home) == []


def mlflow(**changes: Any) -> dict[str, Any]:
    return {"type": "mlflow", "mlflow": {"tracking_uri": "https://m.example", **changes}}


def test_a_host_gets_the_logins_of_the_job_alone_and_its_answers_are_not_shown(
    start: Start, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "of-the-server")
    server = start()
    given = mlflow(username="u", password=SECRET, certificate_file="-----BEGIN CERTIFICATE-----\n")
    job = create(server, given, num_batches=1).json()["id"]
    run_to_the_end(server, job, range(1))
    server.wait_status(job, "succeeded")
    folder = server.home / "jobs" / job
    until(lambda: not (folder / "integrations.json").exists())
    pem = str(folder / "mlflow-certificate.pem")
    logins = {"USERNAME": "u", "PASSWORD": SECRET, "SERVER_CERT_PATH": pem}
    expected = [{f"MLFLOW_TRACKING_{name}": value for name, value in logins.items()}, str(folder)]
    assert json.loads((place / "logins").read_text()) == expected
    assert not Path(pem).exists()
    events = [event for event in server.events(job) if "integration mlflow" in event]
    assert events[-1] == "integration mlflow: https://m.example answered 500 != 200."


@pytest.mark.parametrize(
    ("given", "loc", "words"),
    [
        ({"type": "hf", "hf": {"output_repo_name": "r", "api_token": SECRET}}, "type", "'hf' is not offered"),
        ({"type": "wandb", "wandb": {"api_key": SECRET}}, "project", "Field required"),
        ({"type": "wandb", "wandb": {"project": "p", "api_key": [SECRET]}}, "api_key", "valid string"),
        ({"type": "wandb", "wandb": {"project": "p", "projct": SECRET}}, "projct", "not permitted"),
        (SECRET, "type", "without a type"),
        (mlflow(tracking_uri="https://u:very-secret-key@m.example"), "tracking_uri", "as username and password"),
        (mlflow(tracking_uri="sqlite:////tmp/x.db"), "tracking_uri", "UPWEIGHT_LOCAL_TRACKING=1"),
        (mlflow(tracking_uri="/tmp/runs"), "tracking_uri", "https://"),
        (mlflow(tracking_uri="http://[x"), "tracking_uri", "not a URL"),
        (mlflow(certificate_file="/etc/passwd"), "certificate_file", "PEM"),
    ],
)
def test_refused_integrations_repeat_no_secret(shared: Running, given: Any, loc: str, words: str) -> None:
    answer = create(shared, given)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][1:3] == ["integrations", 0]
    assert answer.json()["detail"][0]["loc"][-1] == loc
    assert words in answer.json()["detail"][0]["msg"]
    assert SECRET not in answer.text


def test_one_of_each_kind_and_what_is_not_told_counts_as_null(shared: Running) -> None:
    assert create(shared, mlflow(), mlflow()).status_code == 422
    given = mlflow(username="u", password=SECRET, certificate_file="", run_name=None)
    answer = create(shared, given)
    settings = {"experiment_name": None, "run_name": None, "tags": None, "certificate_file_id": None}
    assert answer.json()["integrations"] == [
        {"type": "mlflow", "mlflow": {"tracking_uri": "https://m.example", **settings}}
    ]
    assert SECRET not in answer.text
    shared.http.post(f"/v1/fine_tuning/jobs/{answer.json()['id']}/cancel")
