"""API keys and the projects they open. Only hashes are stored."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from upweight.server.store import schema

DEFAULT_PROJECT = "default"
ID_DIGITS = 12


@dataclass(frozen=True)
class KnownKey:
    """What is known of a key: never the key itself."""

    id: str
    project: str
    created_at: float


def hash_key(key: str) -> str:
    # A key holds 256 random bits, so a plain hash cannot be searched backwards.
    return hashlib.sha256(key.encode()).hexdigest()


def key_id(key: str) -> str:
    """The name by which a key is listed and revoked."""
    return _id_of(hash_key(key))


def add_key(connection: Connection, key: str, project: str = DEFAULT_PROJECT) -> None:
    """Let `key` open `project`; does nothing if the key is known."""
    if project_of(connection, key) is not None:
        return
    now = time.time()
    if connection.scalar(select(schema.projects.c.id).where(schema.projects.c.id == project)) is None:
        connection.execute(insert(schema.projects).values(id=project, created_at=now))
    connection.execute(insert(schema.api_keys).values(hash=hash_key(key), project=project, created_at=now))


def project_of(connection: Connection, key: str) -> str | None:
    table = schema.api_keys
    return connection.scalar(select(table.c.project).where(table.c.hash == hash_key(key)))


def list_keys(connection: Connection) -> list[KnownKey]:
    """Oldest first."""
    query = select(schema.api_keys).order_by(schema.api_keys.c.created_at)
    return [KnownKey(_id_of(row.hash), row.project, row.created_at) for row in connection.execute(query)]


def revoke_key(connection: Connection, id: str) -> bool:
    """Whether there was a key with this id. It opens nothing any more; its project and jobs stay."""
    table = schema.api_keys
    found = [row.hash for row in connection.execute(select(table.c.hash)) if _id_of(row.hash) == id]
    connection.execute(delete(table).where(table.c.hash.in_(found)))
    return bool(found)


def _id_of(hashed: str) -> str:
    return f"key-{hashed[:ID_DIGITS]}"
