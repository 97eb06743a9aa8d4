"""Stored samples as a person looks at them: newest batch first, a window at a time.

Invariant: a call reads at most the rows of one window, by the index of batches, however many samples the job has.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, Row, and_, or_, select

from upweight.server.refusals import Refusal, not_found
from upweight.server.store import schema


@dataclass(frozen=True)
class Place:
    """Where a list goes on: below this sample. Written `batch-seq`."""

    batch_index: int
    seq: int

    def __str__(self) -> str:
        return f"{self.batch_index}-{self.seq}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises Refusal 400."""
        batch, _, seq = text.partition("-")
        if not all(part.isascii() and part.isdecimal() and len(part) <= 18 for part in (batch, seq)):
            raise Refusal(400, f"after = {text!r} is not a place in a list; take `next` of the answer before")
        return cls(int(batch), int(seq))


def window(
    connection: Connection, job_id: str, *, rows: int, after: Place | None = None, batch: int | None = None
) -> list[Row]:
    """At most `rows` samples below `after`, newest batch first and newest sample first in it."""
    table = schema.samples
    query = select(table).where(table.c.job_id == job_id)
    if batch is not None:
        query = query.where(table.c.batch_index == batch)
    if after is not None:
        same = and_(table.c.batch_index == after.batch_index, table.c.seq < after.seq)
        # The first bound alone is implied by the second; it lets the index be entered at the place.
        query = query.where(
            table.c.batch_index <= after.batch_index, or_(table.c.batch_index < after.batch_index, same)
        )
    query = query.order_by(table.c.batch_index.desc(), table.c.seq.desc()).limit(rows)
    return list(connection.execute(query))


def get_sample(connection: Connection, job_id: str, sample_id: str) -> Row:
    """Raises Refusal 404."""
    table = schema.samples
    row = connection.execute(select(table).where(table.c.job_id == job_id, table.c.id == sample_id)).first()
    if row is None:
        raise not_found("sample", sample_id)
    return row


def place_of(row: Row) -> Place:
    return Place(row.batch_index, row.seq)
