"""`/v1/files`: upload, list, read, delete. Lists are newest first unless asked otherwise."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse

from upweight.server.api.context import Parts, PartsOf, ProjectOf, write_once
from upweight.server.api.multipart import Received, receive
from upweight.server.home import sync_folder
from upweight.server.refusals import Refusal, invalid, not_found
from upweight.server.store import files

PURPOSES = ("fine-tune", "assistants", "batch", "vision", "user_data", "evals")
LONGEST_NAME = 255
MOST_LISTED = 10_000
FORM_ROOM = 1_000_000  # bytes that a form may have besides its file

Limit = Annotated[int, Query(ge=1, le=MOST_LISTED)]

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/files")


@router.post("")
async def upload(request: Request, parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    limit = parts.settings.max_file_mb * 1_000_000
    await _refuse_without_room(parts, int(request.headers.get("content-length") or 0), limit)
    form = await receive(request, parts.home.files, limit)
    file_id = files.new_file_id()
    path = parts.home.file(file_id)
    try:
        purpose = _checked(form)
        form.path.rename(path)
        await asyncio.to_thread(sync_folder, path.parent)
        row: dict[str, Any] = {
            "filename": _plain_name(form.filename),
            "purpose": purpose,
            "size": form.size,
            "sha256": form.sha256,
        }
        answer, is_new = await write_once(
            request,
            project,
            f"{row}".encode(),
            lambda c: files.file_answer(files.add_file(c, id=file_id, project=project, **row)),
        )
    except Exception:  # nothing stays behind that no row names; after a cancelled write there may be one
        form.path.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    if not is_new:
        path.unlink()
    return answer


@router.get("")
async def list_files(
    parts: PartsOf,
    project: ProjectOf,
    limit: Limit = MOST_LISTED,
    after: str | None = None,
    purpose: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    found, more = await parts.database.read(
        lambda c: files.list_files(c, project, limit=limit, after=after, purpose=purpose, oldest_first=order == "asc")
    )
    data = [files.file_answer(file) for file in found]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": more}


@router.get("/{file_id}")
async def get(file_id: str, parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    return files.file_answer(await parts.database.read(lambda c: files.get_file(c, file_id, project)))


@router.get("/{file_id}/content")
async def content(file_id: str, parts: PartsOf, project: ProjectOf) -> FileResponse:
    file = await parts.database.read(lambda c: files.get_file(c, file_id, project))
    path = parts.home.file(file.id)
    if not path.is_file():  # deleted just now, or by hand
        raise not_found("content of file", file_id)
    name = f"attachment; filename*=UTF-8''{quote(file.filename)}"
    return FileResponse(path, media_type="application/octet-stream", headers={"content-disposition": name})


@router.delete("/{file_id}")
async def delete(file_id: str, parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    """Jobs that use the file go on: each has its own copy."""
    await parts.database.write(lambda c: files.delete_file(c, file_id, project))
    try:
        await asyncio.to_thread(parts.home.file(file_id).unlink, missing_ok=True)
    except OSError as error:  # for everybody it is gone; what is left of it goes at the next start
        log.warning("file %s is deleted, its content cannot be removed: %s", file_id, error)
    return {"id": file_id, "object": "file", "deleted": True}


async def _refuse_without_room(parts: Parts, announced: int, limit: int) -> None:
    """Refuse before anything is read, when the length of the body is told."""
    if announced > limit + FORM_ROOM:
        raise Refusal(413, f"the file is larger than {limit / 1e6:g} MB; split it")
    used = await asyncio.to_thread(parts.home.bytes_used)
    budget, free = parts.settings.disk_budget_gb * 1e9 - used, parts.home.bytes_free()
    if announced > min(budget, free):
        which = "free disk space" if free < budget else "disk budget UPWEIGHT_DISK_BUDGET_GB"
        raise Refusal(
            507,
            f"the file needs {announced / 1e6:.3g} MB, {max(0.0, min(budget, free)) / 1e6:.3g} MB are left of the {which}",
        )


def _checked(form: Received) -> str:
    """The purpose of the form."""
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise invalid(("body", "purpose"), "purpose is missing; 'fine-tune' is that of a training file", "missing")
    if purpose not in PURPOSES:
        raise invalid(("body", "purpose"), f"purpose = {purpose[:80]!r} is unknown; known: {', '.join(PURPOSES)}")
    return purpose


def _plain_name(filename: str) -> str:
    """The last part of a name, without what no line should hold."""
    name = Path(filename.replace("\\", "/")).name
    return re.sub(r"[^\w .()+,@=#-]", "_", name)[:LONGEST_NAME] or "upload"
