"""The start model of a job that was created from a checkpoint, made when the job begins.

Invariant: the start model appears under its name only whole, with the fingerprint recorded for the checkpoint's version; what it
was made of is removed after that.
"""

from __future__ import annotations

import asyncio
import shutil

from upweight.server.home import Home
from upweight.server.settings import Settings
from upweight.server.store import jobs, versions
from upweight.server.store.database import Database
from upweight.server.store.jobs import Job
from upweight.server.supervision.promotion import export_checkpoint


async def make_start_model(job: Job, database: Database, home: Home, settings: Settings) -> None:
    """Does nothing when it is made. Raises Refusal as `export_checkpoint` does."""
    given = job.request["from_checkpoint"]
    start, origin = home.start_model(job.id), home.origin(job.id)
    if not start.exists():
        first = await database.read(lambda c: jobs.get_job(c, given["job_id"]))
        row = await database.read(lambda c: versions.get_version(c, given["job_id"], given["step"]))
        assert row is not None, "versions are never removed"
        (checkpoint,) = origin.iterdir()
        await export_checkpoint(first, str(checkpoint), row.fingerprint, start, home, settings)
    await asyncio.to_thread(shutil.rmtree, origin, ignore_errors=True)
