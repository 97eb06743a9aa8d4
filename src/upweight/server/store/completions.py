"""What the server served, kept so that an uploaded sample can be joined to it by its exact token ids."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from upweight.server.store import schema

KEYS_PER_QUERY = 500


@dataclass(frozen=True, kw_only=True)
class Served:
    """One choice of one answer."""

    key: bytes
    logprobs: bytes | None  # float32 per output token, of the sampling distribution
    raw_logprobs: (
        bytes | None
    )  # float32 per output token, of the whole vocabulary; at `temperature` where `filtered`, else at 1
    versions: bytes  # int32 per output token
    temperature: float
    filtered: bool
    settings: dict[str, Any]
    finish_reason: str | None = None  # "length": the answer was cut


def remember(connection: Connection, job_id: str, served: list[Served]) -> None:
    now = time.time()
    connection.execute(insert(schema.completions), [{"job_id": job_id, "created_at": now, **asdict(s)} for s in served])


def find(connection: Connection, job_id: str, keys: list[bytes]) -> dict[bytes, list[Row]]:
    """Completions by key, oldest first; several may have the same ids."""
    table = schema.completions
    found: dict[bytes, list[Row]] = {}
    wanted = list(dict.fromkeys(keys))
    for start in range(0, len(wanted), KEYS_PER_QUERY):
        some = wanted[start : start + KEYS_PER_QUERY]
        query = select(table).where(table.c.job_id == job_id, table.c.key.in_(some)).order_by(table.c.seq)
        for row in connection.execute(query):
            found.setdefault(row.key, []).append(row)
    return found


def forget(connection: Connection, job_id: str) -> None:
    """A job that is over joins nothing any more."""
    connection.execute(delete(schema.completions).where(schema.completions.c.job_id == job_id))
