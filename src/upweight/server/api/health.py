"""Is the server up, and what does it serve?"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from upweight.server.api.capabilities import INFERENCE
from upweight.server.api.context import PartsOf, ProjectOf
from upweight.server.api.errors import RETRY_AFTER
from upweight.server.api.model_names import job_for_model, served_jobs
from upweight.server.ascii_json import AsciiJSON
from upweight.server.refusals import Refusal
from upweight.server.store import jobs
from upweight.server.store import models as promoted
from upweight.server.store.jobs import Job

router = APIRouter()


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def alive() -> dict[str, str]:
    """This process answers."""
    return {"status": "ok"}


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(parts: PartsOf) -> AsciiJSON:
    """503 while a model that was served cannot be asked: its engine ended, and the job's next worker is not there yet."""
    unfinished = await parts.database.read(jobs.unfinished_jobs)
    expected = [
        job for job in unfinished if job.inference_version is not None and job.job_status not in ("queued", "paused")
    ]
    gone = [job for job in expected if not parts.supervisor.serves(job.id)]
    if not gone:
        return AsciiJSON({"status": "ok", "engines": len(expected)})
    detail = f"{len(gone)} of {len(expected)} engines ended and are being started again"
    headers = {"Retry-After": RETRY_AFTER[503]}
    return AsciiJSON({"status": "unavailable", "detail": detail}, 503, headers)


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def ready(parts: PartsOf) -> dict[str, str]:
    """Answers once the store does."""
    await parts.database.write(lambda c: None)
    return {"status": "ready"}


@router.get("/v1/models")
async def models(parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    """One model per job that serves one: its id is the job's."""
    found = await parts.database.read(lambda c: served_jobs(c, project))
    return {"object": "list", "data": [_model(job) for job in found if job.inference_version is not None]}


@router.get("/v1/models/{name:path}")
async def model(name: str, parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    return _model(await parts.database.read(lambda c: job_for_model(c, project, name, unknown=404)))


@router.delete("/v1/models/{name:path}")
async def delete_model(name: str, parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    """Of models that were promoted; the others are those of their jobs."""
    row = await parts.database.read(lambda c: promoted.find_model(c, project, name))
    if row is None:
        job = await parts.database.read(lambda c: job_for_model(c, project, name, unknown=404))
        raise Refusal(
            409, f"model {name!r} is that of job {job.id}, which keeps it; only promoted models can be deleted"
        )
    await parts.database.write(lambda c: promoted.delete_model(c, row))
    await parts.supervisor.stop_serving(row.id)
    folder = Path(row.path)
    if folder.parent == parts.home.models:  # what a restart would find without a row goes then
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return {"id": row.id, "object": "model", "deleted": True}


def _model(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": "model",
        "created": int(job.created_at),
        "owned_by": job.project,
        "base_model": job.model,
        "inference_version": job.inference_version,
        "capabilities": INFERENCE,
    }
