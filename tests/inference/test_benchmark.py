"""The engine's benchmark: its pieces of work are what they say and its command lines are read. Nothing is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine.http_load import spec_of
from benchmarks.engine.workloads import NAMES, VOCABULARY, workload
from upweight.training.settings import PolicySettings


@pytest.mark.parametrize(
    ("name", "rows", "distinct", "tokens"),
    [
        ("group", 32, 4, 4096),
        ("top_p", 32, 4, 4096),
        ("mixed", 32, 32, 1940),
        ("single", 1, 1, 128),
        ("single_of_32", 1, 1, 128),
    ],
)
def test_the_pieces_of_work(name: str, rows: int, distinct: int, tokens: int) -> None:
    work = workload(name, 1)
    assert name in NAMES
    assert len(work.prompts) == len(work.lengths) == rows
    assert len({tuple(prompt) for prompt in work.prompts}) == distinct
    assert {len(prompt) for prompt in work.prompts} == {64}
    assert all(0 <= token < VOCABULARY for prompt in work.prompts for token in prompt)
    assert work.tokens == tokens
    assert work.top_p == (0.9 if name == "top_p" else 1.0)
    assert work == workload(name, 1) != workload(name, 2)


def test_the_worker_of_the_http_load_is_told_what_a_worker_needs(tmp_path: Path) -> None:
    spec = spec_of("model", tmp_path, None)
    assert PolicySettings.from_method(spec.settings).preset is not None
    assert (spec.method_type, spec.warm_up) == ("reinforcement", 128)


@pytest.mark.parametrize("module", ["run", "upweight_side"])
def test_the_command_lines(module: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.engine.{module}"]
    where = Path(__file__).parents[2]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=where, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert "--device" in shown.stdout
    wrong = subprocess.run([*command, "--no-such"], capture_output=True, text=True, cwd=where, timeout=120)
    assert wrong.returncode == 2
