"""`/v1/fine_tuning/jobs/{job_id}/checkpoints`: list, read, download as safetensors, promote to a model that is served."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from sqlalchemy import Row
from starlette.background import BackgroundTask

from upweight.server.api import openapi
from upweight.server.api.context import JobOf, Parts, PartsOf, parse_json, read_small_body
from upweight.server.api.job_answers import checkpoint_answer, checkpoint_version
from upweight.server.api.paging import DEFAULT_LIMIT, Limit
from upweight.server.home import model_bytes
from upweight.server.refusals import Refusal, invalid, not_found
from upweight.server.store import models, versions
from upweight.server.store.jobs import Job
from upweight.server.supervision.promotion import export_checkpoint

LONGEST_NAME = 64

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/checkpoints")


@router.get("")
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


@router.get("/{checkpoint_id}")
async def checkpoint(checkpoint_id: str, job: JobOf, parts: PartsOf) -> dict[str, Any]:
    return checkpoint_answer(await _row(parts, job, checkpoint_id))


@router.get("/{checkpoint_id}/download")
async def download(checkpoint_id: str, job: JobOf, parts: PartsOf) -> FileResponse:
    """The weights, an adapter merged in, as one safetensors file."""
    row = await _row(parts, job, checkpoint_id)
    folder = parts.home.models / f".{models.new_model_id()}"
    await _export(parts, job, row, folder)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        shutil.rmtree(folder, ignore_errors=True)
        raise Refusal(409, f"the weights are {len(files)} files; promote the checkpoint and take its folder")
    name = f"{job.id}-{row.version}.safetensors"
    return FileResponse(files[0], filename=name, background=BackgroundTask(shutil.rmtree, folder, ignore_errors=True))


@router.post("/{checkpoint_id}/promote", openapi_extra=openapi.PROMOTION)
async def promote(request: Request, checkpoint_id: str, job: JobOf, parts: PartsOf) -> dict[str, Any]:
    """Make a model of the checkpoint. Body: nothing, or {"name": what to call it}."""
    body = await read_small_body(request)
    given = parse_json(body) if body.strip() else {}
    row = await _row(parts, job, checkpoint_id)
    name = given.get("name", f"{job.request.get('suffix') or job.id}-{row.version}")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable() or "/" in name:
        raise invalid(
            ("body", "name"), f"name = {name!r}: 1 to {LONGEST_NAME} printable characters without '/' are needed"
        )
    if (present := await parts.database.read(lambda c: models.find_model(c, job.project, name))) is not None:
        if (present.job_id, present.version) == (job.id, row.version):
            return model_answer(present)  # asked again
        raise Refusal(409, f"model {name!r} exists already; give another name")
    model_id = models.new_model_id()
    folder = parts.home.models / model_id
    await _export(parts, job, row, folder)
    added = {"model_id": model_id, "name": name, "job": job, "version": row.version, "path": str(folder)}
    try:
        made = await parts.database.write(lambda c: models.add_model(c, fingerprint=row.fingerprint, **added))
    except Exception:  # whatever it is goes on; no folder stays behind that no row names
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise
    return model_answer(made)


def model_answer(row: Row) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "model",
        "created": int(row.created_at),
        "owned_by": row.project,
        "name": row.name,
        "fine_tuning_job_id": row.job_id,
        "version": row.version,
        "path": row.path,
    }


async def _row(parts: Parts, job: Job, checkpoint_id: str) -> Row:
    version = checkpoint_version(job.id, checkpoint_id)
    row = await parts.database.read(lambda c: versions.get_version(c, job.id, version))
    if row is None or row.checkpoint is None:
        raise not_found("checkpoint", checkpoint_id)
    return row


async def _export(parts: Parts, job: Job, row: Row, folder: Path) -> None:
    needed, free = model_bytes(Path(job.model_path)), parts.home.bytes_free()
    if needed > free:
        raise Refusal(
            422, f"the model needs about {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; make room first"
        )
    async with parts.exporting:
        await export_checkpoint(job, row.checkpoint, row.fingerprint, folder, parts.home, parts.settings)
