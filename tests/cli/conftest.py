"""A real server as a process, and the command run inside the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from upweight.api_client.models.rl_job import Sample
from upweight.cli import main
from upweight.cli.connection import session

COMMAND = [sys.executable, "-c", "from upweight.cli import main; main()"]
VARIABLES = ("TOKENFACTORY_BASE_URL", "TOKENFACTORY_API_KEY", "UPWEIGHT_TRACEBACK", "UPWEIGHT_PORT", "FORCE_COLOR")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Done]


@pytest.fixture
def upweight(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`upweight("jobs", "list")`: the command in this process, with nothing of it in the environment."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["upweight", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, told.out, told.err)

    return run


@pytest.fixture(scope="session")
def server_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home folder of a server started with `upweight serve`; what it printed is in its file `printed`."""
    home = tmp_path_factory.mktemp("server") / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with (home / "printed").open("w") as printed:
        arguments = ["serve", "--home", str(home), "--port", "0", "--max-running", "2"]
        process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=environment
        )
    end = time.monotonic() + 60
    while not (home / "server.json").exists():
        assert process.poll() is None, (home / "printed").read_text()
        assert time.monotonic() < end
        time.sleep(0.05)
    yield home
    process.terminate()
    assert process.wait(20) == 0


@pytest.fixture
def in_server_home(server_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPWEIGHT_HOME", str(server_home))
    return server_home


BATCHES = 2  # of `trained_job`


def train(job_id: str) -> None:
    """Two samples for each batch, drawn from the job's own endpoint."""
    with session(None, None) as (client, _):
        jobs = client.v1alpha1.fine_tuning.jobs
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "logprobs": True, "return_token_ids": True}
        for index in range(BATCHES):
            url = f"{jobs.endpoint(job_id=job_id)}/inference/openai/v1/chat/completions"
            answer = client.post(url, json=body, timeout=120).json()
            jobs.batches.create(job_id=job_id, index=index)
            jobs.batches.submit_samples(job_id=job_id, batch_index=index, samples=samples(answer, index))
            while (jobs.get_runtime_status(job_id=job_id).inference_version or 0) <= index:
                time.sleep(0.1)


def samples(answer: dict[str, Any], index: int) -> list[Sample]:
    prompt = answer["prompt_token_ids"]
    return [
        Sample(
            id=f"{index}-{choice['index']}",
            token_ids=prompt + choice["token_ids"],
            logprobs=[0.0] * len(prompt) + [entry["logprob"] for entry in choice["logprobs"]["content"]],
            mask=[0] * len(prompt) + [1] * len(choice["token_ids"]),
            normalized_reward=1.0 - 2.0 * choice["index"],
            metadata={},
            debug_info={"reward": float(choice["index"]), "task_id": "t"},
        )
        for choice in answer["choices"]
    ]


@pytest.fixture(scope="session")
def trained_job(server_home: Path, tiny_model_folder: Path) -> dict[str, Any]:
    """A job created by the command, watched by the command, trained to its end; what was printed besides its id."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UPWEIGHT_HOME", str(server_home))
        for name in ("TOKENFACTORY_BASE_URL", "TOKENFACTORY_API_KEY"):
            patch.delenv(name, raising=False)
        sizes = ["--batch-size", "2", "--num-batches", str(BATCHES), "--max-tokens", "6", "--lora-rank", "2"]
        created = command("jobs", "create", "--model", str(tiny_model_folder), *sizes, "--suffix", "first")
        script = (
            created + 'echo "$TOKENFACTORY_ROLLOUT_JOB_ID"; cat "$UPWEIGHT_HOME/api_key"; echo "$TOKENFACTORY_API_KEY"'
        )
        shell = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
        job_id, *keys = shell
        watched = {}
        threads = [
            threading.Thread(
                target=lambda name, *more: watched.update({name: command("jobs", "watch", job_id, *more)}), args=args
            )
            for args in (("text",), ("json", "--json"))
        ]
        for thread in threads:
            thread.start()
        train(job_id)
        for thread in threads:
            thread.join(60)
        return {"id": job_id, "created": created, "keys": keys, **watched}


def command(*arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
