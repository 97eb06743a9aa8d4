"""A model that lies on two devices, and two replicas with one each, answer as one that lies on one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.sharded_program"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr
