"""`upweight jobs …` against a real server with a real worker and a tiny model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import COMMAND, Command


def test_create_prints_a_script_without_the_key(trained_job: dict[str, Any]) -> None:
    assert trained_job["id"].startswith("ftjob-")
    assert trained_job["keys"][0] == trained_job["keys"][1]
    assert trained_job["keys"][0] not in trained_job["created"]


def test_watch_tells_states_versions_and_the_end_once_each(trained_job: dict[str, Any]) -> None:
    lines = [line.partition("  ")[2] for line in trained_job["text"].splitlines()]
    told = [line for line in lines if line.startswith("version ")]
    assert [line.split()[1] for line in told] == ["0", "1", "2"]
    assert "reward 0.500" in told[1]
    assert lines[-1].startswith("succeeded            all 2 batches are trained; weights: ")
    assert "\x1b" not in trained_job["text"]
    documents = [json.loads(line) for line in trained_job["json"].splitlines()]
    assert [v["version"] for d in documents for v in d["versions"]] == [0, 1, 2]
    assert documents[-1]["job_status"] == "succeeded"


def test_show(upweight: Command, in_server_home: Path, trained_job: dict[str, Any]) -> None:
    done = upweight("jobs", "show", trained_job["id"])
    lines = done.out.splitlines()
    assert lines[0] == f"{trained_job['id']}  succeeded"
    # Nothing ends the answers of the tiny model but the limit; grpo trains them all the same.
    assert "samples  4 accepted = 4 trained; 4 truncated" in lines
    weights = in_server_home / "jobs" / trained_job["id"] / "weights"
    assert f"weights  {weights}" in lines
    assert [line.split()[0] for line in lines[-3:]] == ["0", "1", "2"]
    document = upweight("jobs", "show", trained_job["id"], "--json").json()
    assert document["id"] == trained_job["id"]
    assert document["progress"]["versions"][1]["fingerprint"][:12] == lines[-2].split()[6]


def test_a_job_that_is_over_is_watched_and_cancelled_in_one_line(
    upweight: Command, in_server_home: Path, trained_job: dict[str, Any]
) -> None:
    assert upweight("jobs", "watch", trained_job["id"]).code == 0
    done = upweight("jobs", "cancel", trained_job["id"])
    assert (done.code, done.out) == (0, f"{trained_job['id']} was over already: succeeded\n")


def test_list_and_cancel(upweight: Command, in_server_home: Path, trained_job: dict[str, Any]) -> None:
    created = upweight("jobs", "create", "--model", "smollm2", "--method", '{"batch_size": 3}', "--json").json()
    assert created["batch_size"] == 3
    assert created["environment"]["TOKENFACTORY_ROLLOUT_JOB_ID"] == created["id"]
    assert "TOKENFACTORY_API_KEY" not in created["environment"]
    assert created["api_key_file"] == str(in_server_home / "api_key")
    done = upweight("jobs", "cancel", created["id"])
    assert done.out == f"{created['id']} cancelled\n"
    watched = upweight("jobs", "watch", created["id"])
    assert watched.code == 1, "a job that did not succeed is told by the exit code"
    assert "cancelled" in watched.out
    listed = upweight("jobs", "list", "--limit", "1")
    assert listed.out.splitlines()[1].split()[:3] == [created["id"], "cancelled", "0/∞"]
    assert listed.err == "there are more than 1: --limit 10 shows more\n"
    assert trained_job["id"] in [job["id"] for job in upweight("jobs", "list", "--json").json()["data"]]


def test_a_path_is_sent_whole_and_a_name_as_it_is(
    upweight: Command, in_server_home: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model_folder.parent)
    for given, model in ((tiny_model_folder.name, str(tiny_model_folder)), ("smollm2", "smollm2")):
        job = upweight("jobs", "create", "--model", given, "--batch-size", "1", "--json").json()
        upweight("jobs", "cancel", job["id"])
        assert job["model"] == model


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["show", "ftjob-0"], "error: job ftjob-0 does not exist\n"),
        (["watch", "ftjob-0"], "error: job ftjob-0 does not exist\n"),
        (["cancel", "ftjob-0"], "error: job ftjob-0 does not exist\n"),
        (["show", " "], "error: the id of a job is empty; upweight jobs list shows the ids\n"),
        (["show", "../../x"], "error: '../../x' is no id of a job; upweight jobs list shows the ids\n"),
        (
            ["create", "--model", "m", "--training-file", "/tmp"],
            "error: --training-file /tmp is no regular file; give a file of JSON lines\n",
        ),
        (["create", "--model", "m"], "error: batch_size is missing: give --batch-size, or put it into --method\n"),
    ],
)
def test_what_does_not_exist_is_one_line(
    upweight: Command, in_server_home: Path, arguments: list[str], told: str
) -> None:
    done = upweight("jobs", *arguments)
    assert (done.code, done.out, done.err) == (1, "", told)


def test_what_the_server_refuses_is_one_line(
    upweight: Command, in_server_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = upweight("jobs", "create", "--model", "no-such-model", "--batch-size", "1")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "model 'no-such-model' is not known" in done.err
    done = upweight("jobs", "list", "--key", "wrong")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "does not accept the API key of --key" in done.err
    monkeypatch.setenv("UPWEIGHT_HOME", "/nowhere")
    done = upweight("jobs", "list")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "start one with: upweight serve" in done.err


def test_a_checkpoint_is_listed_promoted_and_asked(
    trained_job: dict[str, Any], upweight: Command, in_server_home: Path
) -> None:
    (checkpoint,) = upweight("jobs", "checkpoints", trained_job["id"], "--json").json()
    assert checkpoint["id"] in upweight("jobs", "checkpoints", trained_job["id"]).out
    model = upweight("jobs", "promote", checkpoint["id"], "--json").json()
    assert model["name"] == f"first-{checkpoint['step_number']}"
    assert (Path(model["path"]) / "model.safetensors").exists()
    again = upweight("jobs", "promote", checkpoint["id"])
    assert again.out.split()[1] == model["id"]
    answer = upweight("chat", model["id"], "--prompt", "hi", "--max-tokens", "3", "--json")
    assert answer.code == 0, answer.err
    refused = upweight("jobs", "promote", "nonsense")
    assert (refused.code, refused.err) == (
        1,
        "error: checkpoint 'nonsense': an id that upweight jobs checkpoints shows is needed\n",
    )


def test_a_job_starts_from_a_checkpoint(
    upweight: Command, in_server_home: Path, trained_job: dict[str, Any], tiny_model_folder: Path
) -> None:
    (newest, *_) = upweight("jobs", "checkpoints", trained_job["id"], "--json").json()
    options = ["--model", str(tiny_model_folder), "--batch-size", "2", "--from-checkpoint"]
    created = upweight("jobs", "create", *options, newest["id"], "--json").json()
    assert created["from_checkpoint"] == {
        "type": "ft",
        "checkpoint_id": newest["id"],
        "job_id": trained_job["id"],
        "step": newest["step_number"],
    }
    assert upweight("jobs", "cancel", created["id"]).code == 0
    refused = upweight("jobs", "create", *options, "ftckpt-nowhere-1")
    assert (refused.code, "from_checkpoint" in refused.err) == (1, True)


def test_a_watch_that_nobody_reads_any_more_ends(
    in_server_home: Path, upweight: Command, tiny_model_folder: Path
) -> None:
    create = ["jobs", "create", "--model", str(tiny_model_folder), "--batch-size", "1", "--json"]
    job = upweight(*create).json()["id"]
    upweight("jobs", "pause", job)  # nothing happens to it
    process = subprocess.Popen([*COMMAND, "jobs", "watch", job], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().split()[1] == "paused"
    process.stdout.close()
    assert process.wait(10) == 1
    upweight("jobs", "cancel", job)
