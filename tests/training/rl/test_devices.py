"""Trainers on several devices and in several processes give the results of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import Mesh

from tests.training.rl import mesh_program
from upweight.errors import ConfigError
from upweight.training import Placement


def environment(devices: int) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=1"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(
    "kinds",
    [
        ["grpo"],
        pytest.param(["ppo"], marks=pytest.mark.ci),
        pytest.param(["dpo", "sft"], marks=pytest.mark.soak),
    ],
    ids=lambda kinds: kinds[0],
)
def test_rows_and_parameters_split_over_eight_devices(kinds: list[str]) -> None:
    command = [sys.executable, "-m", "tests.training.rl.mesh_program", *kinds]
    done = subprocess.run(command, env=environment(8), capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("kind", "devices"), [("small", 1), *(pytest.param(kind, 2, marks=pytest.mark.soak) for kind in ("sft", "grpo"))]
)
def test_two_processes(kind: str, devices: int, tmp_path: Path) -> None:
    """Each with devices of its own, joined by `jax.distributed` over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    errors = [tmp_path / f"errors-{i}" for i in range(2)]
    started = []
    for i, path in enumerate(errors):
        with path.open("wb") as file:
            command = [sys.executable, "-c", mesh_program.JOIN, str(i), port, str(tmp_path), kind]
            started.append(subprocess.Popen(command, env=environment(devices), stdout=subprocess.DEVNULL, stderr=file))
    try:
        codes = [process.wait(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0, 0], "".join(path.read_text()[-2000:] for path in errors)
    expected = mesh_program.numbers(mesh_program.made(kind))
    for i in range(2):
        metrics, *arrays = json.loads((tmp_path / f"answer-{i}.json").read_text())
        gradients, params = ([np.asarray(x, np.float32) for x in several] for several in arrays)
        mesh_program.assert_near(mesh_program.Numbers(metrics, gradients, params), expected)


def test_specs() -> None:
    """Each axis takes the largest dimension that it divides and that no other has."""
    mesh = Mesh(np.full((2, 4), None), ("data", "model"))
    placement = Placement(mesh, parameters=("model", "data"))
    assert tuple(placement.spec("", (8, 6))) == ("model", "data")
    assert tuple(placement.spec("", (6, 8))) == ("data", "model")
    assert tuple(placement.spec("", (3,))) == (None,)
    assert placement.row_parts == 2
    assert Placement(mesh, rows=("data", "model")).row_parts == 8
    with pytest.raises(ConfigError, match=r"Placement.parameters names the axis 'tensor'; the mesh has data, model"):
        Placement(mesh, parameters="tensor")
