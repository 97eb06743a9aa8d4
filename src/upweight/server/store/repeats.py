"""Idempotency keys: a POST repeated with its key gets the first answer and has no second effect.

The answer is stored in the transaction of the effect, so a kill leaves both or neither. Refusals are not stored: they had no
effect, and a repetition may meet a better state. Keys are kept `KEPT_SECONDS` per project.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, bindparam, delete, insert, select

from upweight.server.refusals import Refusal
from upweight.server.store import schema

KEPT_SECONDS = 48 * 3600.0

_KEEP = insert(schema.repeats)
_FIND = select(schema.repeats).where(
    schema.repeats.c.project == bindparam("the_project"), schema.repeats.c.key == bindparam("the_key")
)


def once(
    connection: Connection,
    project: str,
    key: str | None,
    request_hash: bytes,
    effect: Callable[[Connection], dict[str, Any]],
) -> tuple[dict[str, Any], bool]:
    """The answer of `effect` and whether it ran now; a known key returns the stored answer instead."""
    if key is None:
        return effect(connection), True
    if (known := first_answer(connection, project, key, request_hash)) is not None:
        return known, False
    answer = effect(connection)
    row = {"project": project, "key": key, "request_hash": request_hash, "status": 200, "answer": answer}
    connection.execute(_KEEP, {**row, "created_at": time.time()})
    return answer, True


def first_answer(connection: Connection, project: str, key: str, request_hash: bytes) -> dict[str, Any] | None:
    """What was answered under `key`, None if nothing was. Raises Refusal 422 when it was used for another request."""
    known = connection.execute(_FIND, {"the_project": project, "the_key": key}).first()
    if known is None:
        return None
    if known.request_hash != request_hash:
        raise Refusal(422, f"Idempotency-Key {key!r} was used for another request; use a new key for each request")
    answer: dict[str, Any] = known.answer
    return answer


def forget_old(connection: Connection) -> None:
    table = schema.repeats
    connection.execute(delete(table).where(table.c.created_at < time.time() - KEPT_SECONDS))
