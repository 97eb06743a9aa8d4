"""`/v1/fine_tuning/jobs`: create, list, read, cancel, pause, resume; events and checkpoints. Lists are newest first, 20 unless asked otherwise."""

from __future__ import annotations

import asyncio
import shutil
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from upweight.server.api import training_files
from upweight.server.api.context import (
    JobOf,
    Parts,
    PartsOf,
    ProjectOf,
    answered_before,
    parse_json,
    read_body,
    write_once,
)
from upweight.server.api.job_answers import checkpoint_answer, checkpoint_version, job_answer
from upweight.server.api.job_requests import parse_request, refuse_without_room, resolve_model
from upweight.server.file_methods import FileMethod
from upweight.server.refusals import Refusal, not_found
from upweight.server.store import jobs, versions

router = APIRouter(prefix="/v1/fine_tuning/jobs")

Limit = Annotated[int, Query(ge=1, le=100)]
DEFAULT_LIMIT = 20


@router.post("")
async def create(request: Request, parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    body = await read_body(request)
    if (first := await answered_before(request, project, body)) is not None:
        return first
    wanted = parse_request(parse_json(body))
    model_path, model_name = await resolve_model(parts, wanted.model)
    file = None
    if isinstance(wanted.method, FileMethod):
        file = await training_files.take(parts, project, wanted.kept["training_file"], wanted.method, model_path)
        settings = file.settings
    else:
        settings = wanted.method.model_dump(mode="json")
    await refuse_without_room(parts, model_path, settings)
    job_id = jobs.new_job_id()
    if file is not None:
        await asyncio.to_thread(training_files.keep, file, parts.home.training_file(job_id))

    def effect(connection: Any) -> dict[str, Any]:
        job = jobs.create_job(
            connection,
            job_id=job_id,
            project=project,
            model=wanted.model,
            model_path=model_path,
            request={**wanted.kept, "model_name": model_name},
            settings=settings,
        )
        for warning in [*wanted.warnings, *(file.notes if file is not None else ())]:
            jobs.add_event(connection, job.id, warning, level="warn")
        return job_answer(connection, job)

    is_new = False
    try:
        answer, is_new = await write_once(request, project, body, effect)
    except Refusal:
        await _drop_copy(parts, file, job_id)
        raise
    if not is_new:
        await _drop_copy(parts, file, job_id)
        return answer
    parts.supervisor.submit(answer["id"])
    return answer


async def _drop_copy(parts: Parts, file: training_files.TrainingFile | None, job_id: str) -> None:
    if file is not None:
        await asyncio.to_thread(shutil.rmtree, parts.home.job_folder(job_id))


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


@router.get("/{job_id}/checkpoints")
async def checkpoints(
    job: JobOf, parts: PartsOf, limit: Limit = DEFAULT_LIMIT, after: str | None = None
) -> dict[str, Any]:
    rows = await parts.database.read(lambda c: versions.checkpoints(c, job.id))
    if after is not None:
        rows = [row for row in rows if row.version < checkpoint_version(job.id, after)]
    data = [{**checkpoint_answer(row), "result_files": []} for row in rows[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(rows) > limit,
    }


@router.get("/{job_id}/checkpoints/{checkpoint_id}")
async def checkpoint(checkpoint_id: str, job: JobOf, parts: PartsOf) -> dict[str, Any]:
    version = checkpoint_version(job.id, checkpoint_id)
    row = await parts.database.read(lambda c: versions.get_version(c, job.id, version))
    if row is None or row.checkpoint is None:
        raise not_found("checkpoint", checkpoint_id)
    return checkpoint_answer(row)
