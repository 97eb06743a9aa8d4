"""The trainers' benchmark: its work is what it says and its command lines are read. Nothing is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trainer.run import executed_gflop
from benchmarks.trainer.side import LENGTH, PROMPT, ROWS, sequences


def test_the_pieces_of_work() -> None:
    tokens, mask = sequences(np.random.default_rng(0), ROWS)
    assert tokens.shape == mask.shape == (16, 256)
    answers = mask.sum(axis=1)
    assert (mask[:, :PROMPT] == 0).all()
    assert answers.min() >= (LENGTH - PROMPT) // 2
    assert answers.max() <= LENGTH - PROMPT
    # 25.3 M parameters in the layers, forward and backward; 16.4 M in the head, at trained places and forward once more.
    expected = 6e-3 * 25.3 * (answers.sum() + 16 * PROMPT) + 8e-3 * 16.4 * answers.sum()
    assert executed_gflop("ppo") == pytest.approx(expected, rel=0.05)  # attention is the rest
    assert executed_gflop("grpo") > executed_gflop("ppo")


def test_the_command_line() -> None:
    command = [sys.executable, "-m", "benchmarks.trainer.run"]
    where = Path(__file__).parents[3]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=where, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "--peer-python" in shown.stdout
