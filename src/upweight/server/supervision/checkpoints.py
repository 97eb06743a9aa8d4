"""Which checkpoints of a job exist, which one to start from, which ones go.

Invariants: a checkpoint is recorded only after the worker called it complete; the newest recorded one is never removed. Nobody else
removes any.
"""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from upweight.server.store import versions
from upweight.server.store.database import Database


def newest_usable(connection: Connection, job_id: str) -> str | None:
    """Path of the newest recorded checkpoint that is still on the disk; None = start from the start model."""
    for row in versions.checkpoints(connection, job_id):
        if Path(row.checkpoint).exists():
            return str(row.checkpoint)
    return None


async def drop_old(database: Database, job_id: str, keep: int, job_folder: Path) -> None:
    """Forget and delete all recorded checkpoints but the newest `keep`, and what a worker that was killed left beside them.

    Nothing outside the job's folder is touched. To be called while the worker saves none.
    """
    rows = await database.read(lambda c: versions.checkpoints(c, job_id))
    for row in rows[keep:]:
        version, path = row.version, Path(row.checkpoint)
        await database.write(partial(versions.set_checkpoint, job_id=job_id, version=version, path=None))
        if path.resolve().is_relative_to(job_folder.resolve()):
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
    kept = {Path(row.checkpoint).resolve() for row in rows[:keep]}
    for path in (job_folder / "checkpoints").glob("*"):
        if path.resolve() not in kept:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
