"""API keys and the projects they open. Only hashes are stored."""

from __future__ import annotations

import hashlib
import time

from sqlalchemy import Connection, insert, select

from upweight.server.store import schema

DEFAULT_PROJECT = "default"


def hash_key(key: str) -> str:
    # A key holds 256 random bits, so a plain hash cannot be searched backwards.
    return hashlib.sha256(key.encode()).hexdigest()


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
