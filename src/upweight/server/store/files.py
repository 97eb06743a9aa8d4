"""Uploaded files: what is known about them. Their bytes lie in the home folder under the file's id.

Invariants:
* A row is written after its bytes are on the disk, and marked as deleted before they are removed.
* The row of a deleted file stays, so that a request that names it is told what happened to it.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from upweight.server.refusals import Refusal, not_found
from upweight.server.store import schema


@dataclass(frozen=True, kw_only=True)
class File:
    """A row of the table of files."""

    seq: int
    id: str
    project: str
    created_at: float
    filename: str
    purpose: str
    size: int  # bytes
    sha256: bytes
    deleted_at: float | None


def new_file_id() -> str:
    return "file-" + secrets.token_hex(12)


def add_file(
    connection: Connection, *, id: str, project: str, filename: str, purpose: str, size: int, sha256: bytes
) -> File:
    row = {"id": id, "project": project, "filename": filename, "purpose": purpose, "size": size, "sha256": sha256}
    connection.execute(insert(schema.files).values(**row, created_at=time.time()))
    return get_file(connection, id, project)


def get_file(connection: Connection, file_id: str, project: str) -> File:
    """Raises Refusal 404 when the project has no such file (any more)."""
    row = connection.execute(select(schema.files).where(schema.files.c.id == file_id)).first()
    if row is None or row.project != project:
        raise not_found("file", repr(file_id[:80]))
    if row.deleted_at is not None:
        raise Refusal(404, f"file {file_id} was deleted; upload it again")
    return File(**row._mapping)


def list_files(
    connection: Connection, project: str, *, limit: int, after: str | None, purpose: str | None, oldest_first: bool
) -> tuple[list[File], bool]:
    """At most `limit` files that lie behind file `after` in the order asked for, and whether more follow."""
    table = schema.files
    query = select(table).where(table.c.project == project, table.c.deleted_at.is_(None)).limit(limit + 1)
    query = query.order_by(table.c.seq if oldest_first else table.c.seq.desc())
    if purpose is not None:
        query = query.where(table.c.purpose == purpose)
    if after is not None:
        seq = connection.scalar(select(table.c.seq).where(table.c.id == after, table.c.project == project))
        if seq is None:
            raise not_found("file", repr(after[:80]))
        query = query.where(table.c.seq > seq if oldest_first else table.c.seq < seq)
    found = [File(**row._mapping) for row in connection.execute(query)]
    return found[:limit], len(found) > limit


def delete_file(connection: Connection, file_id: str, project: str) -> None:
    get_file(connection, file_id, project)
    connection.execute(update(schema.files).where(schema.files.c.id == file_id).values(deleted_at=time.time()))


def present_ids(connection: Connection) -> set[str]:
    """Of the files of all projects."""
    table = schema.files
    return set(connection.scalars(select(table.c.id).where(table.c.deleted_at.is_(None))))


def file_answer(file: File) -> dict[str, Any]:
    """The file as it goes over the wire."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created_at),
        "expires_at": None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
