"""Is the server up, and what does it serve?"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from upweight import __version__
from upweight.server.api.context import PartsOf, ProjectOf
from upweight.server.store import jobs

router = APIRouter()


@router.get("/healthz")
@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
async def ready(parts: PartsOf) -> dict[str, str]:
    """Answers once the store does."""
    await parts.database.write(lambda c: None)
    return {"status": "ready"}


@router.get("/")
async def front() -> PlainTextResponse:
    return PlainTextResponse(
        f"upweight {__version__} job server\n\n"
        "POST /v1/fine_tuning/jobs                             create a job\n"
        "GET  /v1/fine_tuning/jobs                             list jobs\n"
        "GET  /v1alpha1/fine_tuning/jobs/{job_id}/progress     how a job stands\n"
        "GET  /healthz, /readyz                                health\n\n"
        "All routes but this one and health need the header 'Authorization: Bearer <key>'.\n"
    )


@router.get("/v1/models")
async def models(parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    """One model per job that serves one: its id is the job's."""
    found, _ = await parts.database.read(lambda c: jobs.list_jobs(c, project, limit=1000, after=None))
    data = [
        {
            "id": job.id,
            "object": "model",
            "created": int(job.created_at),
            "owned_by": project,
            "base_model": job.model,
            "inference_version": job.inference_version,
        }
        for job in found
        if job.inference_version is not None and job.job_status not in ("failed", "cancelled")
    ]
    return {"object": "list", "data": data}
