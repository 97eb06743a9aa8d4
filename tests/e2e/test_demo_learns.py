"""The main job with the real 135M model: it learns, and a killed run is finished. Minutes, so not in the default tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from upweight.demo.plan import MISMATCH_LIMIT

COMMAND = [sys.executable, "-m", "upweight.cli", "demo", "--json"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**os.environ, "UPWEIGHT_HOME": str(tmp_path_factory.mktemp("home"))}


def finish(environment: dict[str, str], *options: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([*COMMAND, *options], env=environment, capture_output=True, text=True, timeout=900)
    assert done.stdout.strip(), done.stderr
    return done.returncode, json.loads(done.stdout.strip().splitlines()[-1])


def check_run(result: dict[str, Any], batches: int) -> None:
    assert result["batches"] == result["versions"] == batches
    assert result["ledger_ok"]
    assert result["mismatch_max"] < MISMATCH_LIMIT
    assert result["peak_memory_bytes"] < 8e9
    assert Path(result["weights"], "model.safetensors").is_file()


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_it_learns(environment: dict[str, str]) -> None:
    code, result = finish(environment, "--steps", "8", "--seed", "1")
    assert code == 0, result
    check_run(result, 8)
    assert result["eval_after"] >= result["eval_before"] + 0.10
    assert result["p_value"] < 0.01
    assert result["eval_tasks"] >= 128


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_killed_run_is_finished_with_the_planned_batches(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--quick", "--steps", "4"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any("batch 2/4" in line for line in process.stderr)
    process.kill()
    process.communicate(timeout=30)
    code, result = finish(environment, "--resume")
    assert code == 0, result
    check_run(result, 4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["--lora", "--full"])
def test_it_learns_with_every_seed(environment: dict[str, str], seed: int, kind: str) -> None:
    code, result = finish(environment, kind, "--seed", str(seed))
    print(json.dumps({"kind": kind, "seed": seed, **result}))
    assert code == 0, result
    check_run(result, result["batches"])
