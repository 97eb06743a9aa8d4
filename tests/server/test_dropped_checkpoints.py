"""Who removes checkpoints: the server alone, once a newer one is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from upweight.server.store import jobs, versions
from upweight.server.store.database import Database
from upweight.server.supervision.checkpoints import drop_old, newest_usable
from upweight.server.worker.core import WorkerCore
from upweight.server.worker_protocol import TrainResult, WorkerMode, WorkerSpec


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    store = Database(tmp_path / "store.sqlite3")
    yield store
    store.close()


def recorded(database: Database, folder: Path, count: int) -> str:
    """A job with a checkpoint of each version from 1 to `count`."""
    settings = {"batch_size": 1, "num_batches": None}
    job = (
        database.submit(
            lambda c: jobs.create_job(c, project="p", model="m", model_path="/m", request={}, settings=settings)
        )
        .result()
        .id
    )
    for version in range(1, count + 1):
        path = folder / "checkpoints" / f"version-{version:06d}"
        path.mkdir(parents=True)
        result = TrainResult(
            version=version, fingerprint="f", fingerprint_ok=True, update_skipped=False, metrics={}, fates=[], seconds=1
        )
        database.submit(lambda c, r=result: versions.record_version(c, job, r, [], {})).result()
        database.submit(lambda c, v=version, p=path: versions.set_checkpoint(c, job, v, str(p))).result()
    return job


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_recorded_ones_stay_and_remains_of_killed_workers_go(database: Database, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    job = recorded(database, folder, 3)
    for name in ("version-000004.orbax-checkpoint-tmp", "version-000005"):  # the second was never recorded
        (folder / "checkpoints" / name).mkdir()
    asyncio.run(drop_old(database, job, 2, folder))
    assert left(folder) == ["version-000002", "version-000003"]
    asyncio.run(drop_old(database, job, 1, folder))
    assert left(folder) == ["version-000003"]
    newest = database.read_now(lambda c: newest_usable(c, job))
    assert newest == str(folder / "checkpoints" / "version-000003")


def test_a_worker_that_saves_removes_nothing(tiny_model_folder: Path, tmp_path: Path) -> None:
    """The server may be killed before it records the new one: the older must still be there then."""
    settings = {"batch_size": 1, "keep_checkpoints": 1, "lora": {"rank": 1}}
    spec = WorkerSpec(
        job_id="j",
        mode=WorkerMode.TRAIN,
        model=str(tiny_model_folder),
        model_names=["m"],
        socket=str(tmp_path / "socket"),
        folder=str(tmp_path),
        settings=settings,
    )
    core = WorkerCore(spec)
    core.start()
    core.wait_ready()
    try:
        assert core.trainer is not None
        for version in (1, 2):
            core.trainer.version = version
            core.checkpoint()
    finally:
        core.engine.stop()
    assert left(tmp_path) == ["version-000001", "version-000002"]
