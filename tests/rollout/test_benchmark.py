"""The benchmark runs, and what does not depend on the machine's load holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# The client that this contract comes from took 1.1 ms of CPU for a sample of 64 tokens; the aim is a fifth, for 512 tokens.
MOST_CPU_MS = 0.22


@pytest.mark.soak
def test_cpu_per_sample_and_uploads_per_batch() -> None:
    command = [sys.executable, "-m", "benchmarks.sdk.run", "--samples", "8000"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], timeout=120
    )
    results = json.loads(done.stdout)["results"]
    for mode in ("thread", "async"):
        assert results[mode]["cpu_ms_per_sample"] < MOST_CPU_MS
        assert results[mode]["uploads_per_batch"] <= 8
        assert results[mode]["share_of_floor"] > 0.05
