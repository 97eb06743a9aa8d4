"""`/v1/fine_tuning/jobs`: create, list, read, cancel, pause, resume; events. Lists are newest first, 20 unless asked otherwise."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

from fastapi import APIRouter, Request

from upweight.server import integrations
from upweight.server.api import openapi, origins, training_files
from upweight.server.api.context import (
    JobOf,
    PartsOf,
    ProjectOf,
    answered_before,
    parse_json,
    read_small_body,
    write_once,
)
from upweight.server.api.job_answers import job_answer
from upweight.server.api.job_requests import parse_request, refuse_without_room, resolve_model
from upweight.server.api.paging import DEFAULT_LIMIT, Limit
from upweight.server.file_methods import FileMethod
from upweight.server.store import jobs

router = APIRouter(prefix="/v1/fine_tuning/jobs")


@router.post("", openapi_extra=openapi.JOB)
async def create(request: Request, parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    body = await read_small_body(request)
    if (first := await answered_before(request, project, body)) is not None:
        return first
    wanted = parse_request(parse_json(body), local_tracking=parts.settings.local_tracking)
    origin = None
    if (given := wanted.from_checkpoint) is not None:
        origin = await parts.database.read(lambda c: origins.find(c, project, given, wanted.model))
        model_path, model_name = origin.job.model_path, origin.job.request["model_name"]
    else:
        model_path, model_name = await resolve_model(parts, project, wanted.model)
    file, notes = None, list[str]()
    if isinstance(wanted.method, FileMethod):
        file = await training_files.take(parts, project, wanted.kept, wanted.method, model_path)
        settings, notes = file.settings, file.notes
    else:
        settings = wanted.method.model_dump(mode="json")
    await refuse_without_room(parts, model_path, settings, with_start=origin is not None)
    job_id = jobs.new_job_id()
    folder = parts.home.job_folder(job_id)
    if origin is not None:
        model_path = str(parts.home.start_model(job_id))

    def effect(connection: Any) -> dict[str, Any]:
        if origin is not None and not origins.still_there(connection, origin):
            raise origins.gone(origin)
        job = jobs.create_job(
            connection,
            job_id=job_id,
            project=project,
            model=wanted.model,
            model_path=model_path,
            request={**wanted.kept, "model_name": model_name, **({"from_checkpoint": origin.kept} if origin else {})},
            settings=settings,
        )
        for warning in [*wanted.warnings, *notes]:
            jobs.add_event(connection, job.id, warning, level="warn")
        return job_answer(connection, job)

    try:
        if file is not None:
            await asyncio.to_thread(training_files.keep, file, folder)
        if origin is not None:
            await asyncio.to_thread(origins.keep, origin, parts.home.origin(job_id))
        if wanted.integrations:
            await asyncio.to_thread(integrations.keep, wanted.integrations, folder)
        answer, is_new = await write_once(request, project, body, effect)
    except Exception:  # whatever it is goes on; no folder stays behind of a job that does not exist
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise
    if not is_new:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return answer
    parts.supervisor.submit(answer["id"])
    return answer


@router.get("")
async def list_jobs(
    parts: PartsOf, project: ProjectOf, limit: Limit = DEFAULT_LIMIT, after: str | None = None
) -> dict[str, Any]:
    def look(connection: Any) -> dict[str, Any]:
        found, more = jobs.list_jobs(connection, project, limit=limit, after=after)
        return {"object": "list", "data": [job_answer(connection, job) for job in found], "has_more": more}

    return await parts.database.read(look)


@router.get("/{job_id}")
async def get(job: JobOf, parts: PartsOf) -> dict[str, Any]:
    return await parts.database.read(lambda c: job_answer(c, job))


@router.post("/{job_id}/cancel")
async def cancel(job: JobOf, parts: PartsOf) -> dict[str, Any]:
    # Cancelling twice has the effect of cancelling once, so a repeated key needs no record.
    await parts.supervisor.cancel(job.id)
    return await parts.database.read(lambda c: job_answer(c, jobs.get_job(c, job.id)))


@router.post("/{job_id}/pause")
async def pause(job: JobOf, parts: PartsOf) -> dict[str, Any]:
    await parts.supervisor.pause(job.id)
    return await parts.database.read(lambda c: job_answer(c, jobs.get_job(c, job.id)))


@router.post("/{job_id}/resume")
async def resume(job: JobOf, parts: PartsOf) -> dict[str, Any]:
    await parts.supervisor.resume(job.id)
    return await parts.database.read(lambda c: job_answer(c, jobs.get_job(c, job.id)))


@router.get("/{job_id}/events")
async def events(job: JobOf, parts: PartsOf, limit: Limit = DEFAULT_LIMIT, after: str | None = None) -> dict[str, Any]:
    found, more = await parts.database.read(lambda c: jobs.list_events(c, job.id, limit=limit, after=after))
    return {"object": "list", "data": found, "has_more": more}
