"""The trackers themselves, read back with their own readers. They are extras, so this belongs to the soak tier:

    uv run --extra local --extra tensorboard --extra wandb --extra mlflow --extra trackio --group tests \
        pytest -n 0 -m soak tests/training/callbacks/test_real_trackers.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.soak

LOOP = """
from upweight.training import callbacks as c
callback = {make}
tracked = c.tracked("run", callback)
tracked.on_train_begin(None)
for step, loss in enumerate([1.5, 0.75, 0.5]):
    tracked.on_batch_begin(None, step)
    tracked.on_batch_end(None, step, {{"total_loss": loss, "grad_norm": 2.0 * loss, "note": "text"}})
tracked.on_train_end(None)
"""
WANDB_ROWS = Path(__file__).parents[2] / "wandb_rows.py"
EXPECTED = [[0, 1.5], [1, 0.75], [2, 0.5]]


def run(make: str, read: str, folder: Path, **variables: str) -> Any:
    """What `read` prints as JSON after three steps, each in a process of its own that works in `folder`."""
    environment = os.environ | {"WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"} | variables
    said = ""
    for code in (LOOP.format(make=make), read):
        command = [sys.executable, "-c", code, "."]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        said = done.stdout
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [[line["step"], line["total_loss"]] for line in lines] == EXPECTED
    return json.loads(said.splitlines()[-1])


def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    read = """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator("board").Reload()
print(json.dumps([found.Tags()["scalars"], [[e.step, e.value] for e in found.Scalars("total_loss")]]))
"""
    names, rows = run('c.TensorBoardLoggerCallback(c.TensorBoardLoggerConfig(log_dir="board"))', read, tmp_path)
    assert sorted(names) == ["grad_norm", "total_loss"]
    assert rows == EXPECTED


def test_mlflow_keeps_a_run_in_a_local_database(tmp_path: Path) -> None:
    make = (
        'c.MlflowLoggerCallback(c.MlflowLoggerConfig("tests", "sqlite:///runs.db", name="first", tags={"kind": "t"}, '
        'params={"rate": 0.1}))'
    )
    read = """
import json, mlflow
client = mlflow.MlflowClient("sqlite:///runs.db")
(run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
rows = [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, "total_loss")]
print(json.dumps([run.info.run_name, run.info.status, run.data.params, run.data.tags["kind"], rows]))
"""
    assert run(make, read, tmp_path) == ["first", "FINISHED", {"rate": "0.1"}, "t", EXPECTED]


def test_wandb_keeps_an_offline_run(tmp_path: Path) -> None:
    make = 'c.WandbLoggerCallback(c.WandbLoggerConfig("tests", name="first", mode="offline", log_dir=".", config={"rate": 0.1}))'
    rows = run(make, WANDB_ROWS.read_text(), tmp_path)
    assert [[row["_step"], row["total_loss"]] for row in rows] == EXPECTED


def test_trackio_keeps_a_local_run(tmp_path: Path) -> None:
    make = 'c.TrackioLoggerCallback(c.TrackioLoggerConfig("tests", name="first", config={"rate": 0.1}))'
    read = """
import json
from trackio.sqlite_storage import SQLiteStorage
rows = [[row["step"], row["total_loss"]] for row in SQLiteStorage.get_logs("tests", "first") if "total_loss" in row]
print(json.dumps([SQLiteStorage.get_runs("tests"), rows]))
"""
    assert run(make, read, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio")) == [["first"], EXPECTED]
