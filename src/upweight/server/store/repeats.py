"""Idempotency keys: a POST repeated with its key gets the first answer and has no second effect.

The answer is stored in the transaction of the effect, so a kill leaves both or neither. Refusals are not stored: they had no
effect, and a repetition may meet a better state. Keys are kept `KEPT_SECONDS` per project.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, delete, insert, select

from upweight.server.refusals import Refusal
from upweight.server.store import schema

KEPT_SECONDS = 48 * 3600.0

_KEEP = insert(schema.repeats)
_FIND = select(schema.repeats.c.key, schema.repeats.c.request_hash, schema.repeats.c.answer).where(
    schema.repeats.c.project == bindparam("the_project"), schema.repeats.c.key.in_(bindparam("keys", expanding=True))
)


@dataclass(frozen=True)
class Answered:
    """What was answered under a key."""

    key: str
    request_hash: bytes
    answer: dict[str, Any]

    def to(self, request_hash: bytes) -> dict[str, Any]:
        """The answer for a request that is the same. Raises Refusal 422 for another one."""
        if self.request_hash != request_hash:
            raise Refusal(
                422, f"Idempotency-Key {self.key!r} was used for another request; use a new key for each request"
            )
        return self.answer


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
    keep(connection, project, [Answered(key, request_hash, answer)])
    return answer, True


def first_answer(connection: Connection, project: str, key: str, request_hash: bytes) -> dict[str, Any] | None:
    """What was answered under `key`, None if nothing was. Raises Refusal 422 when it was used for another request."""
    known = first_answers(connection, project, [key]).get(key)
    return None if known is None else known.to(request_hash)


def first_answers(connection: Connection, project: str, keys: Sequence[str]) -> dict[str, Answered]:
    """By key, those of `keys` that were answered."""
    if not keys:
        return {}
    rows = connection.execute(_FIND, {"the_project": project, "keys": keys})
    return {key: Answered(key, request_hash, answer) for key, request_hash, answer in rows}


def keep(connection: Connection, project: str, several: Sequence[Answered]) -> None:
    now = time.time()
    rows = [{"project": project, "status": 200, "created_at": now, **vars(each)} for each in several]
    if rows:
        connection.execute(_KEEP, rows)


def forget_old(connection: Connection) -> None:
    table = schema.repeats
    connection.execute(delete(table).where(table.c.created_at < time.time() - KEPT_SECONDS))
