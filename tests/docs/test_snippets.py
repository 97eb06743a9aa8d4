"""Every program of the pages is run for real: server process, worker, training; with a tiny model in place of the named one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.pages import ROOT, blocks, programs
from upweight.demo.server_process import ServerProcess

README, JOBS, ROLLOUTS = ROOT / "README.md", ROOT / "docs" / "jobs.md", ROOT / "docs" / "rollouts.md"
ONLINE = ROOT / "docs" / "online.md"
INFERENCE = ROOT / "docs" / "inference.md"
TRAINERS = ROOT / "docs" / "trainers.md"
NAMED_MODEL = "SmolLM2-135M-Instruct"
CREATE = f'eval "$(upweight jobs create --model {NAMED_MODEL} --batch-size 8 --num-batches 2 --max-tokens 8)"'
TIMEOUT_S = 120


@dataclass
class Place:
    """A server that runs, and a shell as a reader of the pages has it."""

    home: Path
    model: str
    server: ServerProcess

    def shell(self, script: str, folder: Path) -> str:
        """Standard output of a script of the pages; fails with all it said."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENFACTORY_")}
        environment |= {
            "UPWEIGHT_HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TOKENFACTORY_ROLLOUT_STATUS_POLLING_INTERVAL": "0.05",
        }
        done = subprocess.run(
            ["bash", "-euc", self.fitted(script)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fitted(self, text: str) -> str:
        return text.replace(NAMED_MODEL, self.model)

    def run(self, program: str, create: str, folder: Path) -> str:
        """Creates a job as a page says, runs a program on it, returns the job's id."""
        (folder / "program.py").write_text(self.fitted(program))
        told = self.shell(f'{create}\npython program.py >&2\necho "$TOKENFACTORY_ROLLOUT_JOB_ID"', folder)
        return told.strip()

    def finished(self, job_id: str) -> dict[str, Any]:
        """The progress of a job once it is over."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            told: dict[str, Any] = httpx.get(
                f"{self.server.url}/v1alpha1/fine_tuning/jobs/{job_id}/progress",
                headers={"Authorization": f"Bearer {self.server.key}"},
                timeout=30,
            ).json()
            if told["job_status"] in ("succeeded", "failed", "cancelled"):
                return told
            time.sleep(0.1)
        raise AssertionError(f"job {job_id} is still {told['job_status']}: {told['reason']}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Place]:
    home = tmp_path_factory.mktemp("home")
    with ServerProcess(home) as server:
        yield Place(home, str(tiny_model_folder), server)


def test_quick_start(place: Place, tmp_path: Path) -> None:
    """The README from `jobs create` to talking to the result, with its own shell lines."""
    shell = [block.text for block in blocks(README) if block.language == "sh"]
    create = next(text for text in shell if "jobs create" in text)
    assert "`python quick_start.py`" in README.read_text()
    job_id = place.run(programs(README)["quick_start"], create, tmp_path)
    job = place.finished(job_id)
    assert (job["job_status"], job["inference_version"], job["filled_batches"]) == ("succeeded", 2, 2)
    assert [version["version"] for version in job["versions"]] == [0, 1, 2]
    assert job["ledger"]["accepted"] == 16
    assert Path(job["weights"]) == place.home / "jobs" / job_id / "weights"
    names = {path.name for path in Path(job["weights"]).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    look = next(text for text in shell if "jobs watch ID" in text)
    watch, chat, _ = look.replace("ID", job_id).splitlines()
    assert re.search(r"succeeded +all 2 batches are trained", place.shell(watch, tmp_path))
    place.shell(f"{chat} --prompt Hello --max-tokens 4", tmp_path)


@pytest.mark.parametrize("name", ["evaluate", "asynchronous", "turns"])
def test_rollout_programs_train_two_versions(name: str, place: Place, tmp_path: Path) -> None:
    job = place.finished(place.run(programs(ROLLOUTS)[name], CREATE, tmp_path))
    assert (job["job_status"], job["version"]) == ("succeeded", 2)
    assert len({version["fingerprint"] for version in job["versions"]}) == 3  # rewards differ, so weights move
    if name == "evaluate":
        scores = {entry["batch_index"]: entry["metrics"]["shortness"] for entry in job["client_metrics"]}
        assert sorted(scores) == [0, 1, 2]


def test_job_program(place: Place, tmp_path: Path) -> None:
    job_id = place.run(programs(JOBS)["create"], CREATE, tmp_path)
    place.shell(f"upweight jobs cancel {job_id}", tmp_path)
    listed = place.shell("upweight jobs list", tmp_path)
    assert listed.count("cancelled") == 2


def test_file_program(place: Place, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(place.fitted(programs(JOBS)["teach"]))
    address = f"export TOKENFACTORY_BASE_URL={place.server.url} TOKENFACTORY_API_KEY={place.server.key}"
    told = place.shell(f"{address}\npython program.py", tmp_path)
    assert told.startswith("succeeded ftjob-")
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    )
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    shell = next(block.text for block in blocks(JOBS) if "--training-file" in block.text)
    ids = re.findall(r"jobs watch (\S+)", place.shell(shell, tmp_path))
    listed = place.shell("\n".join(f"upweight jobs cancel {job_id}" for job_id in ids), tmp_path)
    ended = ("cancelled", "was over already: succeeded")  # a job on one row may be quicker than the command
    assert [line.partition(" ")[0] for line in listed.splitlines()] == ids
    assert all(line.partition(" ")[2] in ended for line in listed.splitlines())
    assert len(ids) == 2


def test_online_program(tiny_model_folder: Path, tmp_path: Path) -> None:
    """Without a server; two batches are rolled out once and trained on twice."""
    (tmp_path / "program.py").write_text(programs(ONLINE)["online"].replace(NAMED_MODEL, str(tiny_model_folder)))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [["1", "True"], ["2", "True"], ["3", "False"], ["4", "False"]]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "trained").iterdir()}


def test_trainers_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(programs(TRAINERS)["devices"])
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'update_skipped': 0.0" in done.stdout


def test_every_program_is_run_above() -> None:
    found = {
        (page.name, name) for page in (README, JOBS, ROLLOUTS, INFERENCE, ONLINE, TRAINERS) for name in programs(page)
    }
    part = {("rollouts.md", "group"), ("trainers.md", "grpo")}  # the beginning of others of their page
    run = {("README.md", "quick_start"), ("jobs.md", "create"), ("jobs.md", "teach")}
    run |= {("rollouts.md", "evaluate"), ("rollouts.md", "asynchronous"), ("rollouts.md", "turns")}
    run |= {("inference.md", "openai"), ("inference.md", "anthropic"), ("online.md", "online")}
    run |= {("trainers.md", "devices")}
    assert found == run | part
    pages = (JOBS, ROLLOUTS, INFERENCE, ONLINE, TRAINERS)
    assert not any(programs(page) for page in (ROOT / "docs").glob("*.md") if page not in pages)
