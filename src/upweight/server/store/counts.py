"""What the ledger counts, kept while samples come and change: reading it costs the same for a thousand of them and a million.

Invariant: at every commit the counts of a job are those that `recount` finds in its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, bindparam, func, insert, select, update

from upweight.server.store import schema

# How samples were drawn, whatever became of them.
APART = ("unmatched", "filtered", "truncated")

_GROW = (
    update(schema.counts)
    .where(schema.counts.c.job_id == bindparam("the_job"), schema.counts.c.name == bindparam("the_name"))
    .values({schema.counts.c["count"]: schema.counts.c["count"] + bindparam("change")})
)


def add(connection: Connection, job_id: str, changes: Mapping[str, int]) -> None:
    """`changes`: name of a count → by how much it grows. The store has one writer, so looking and writing are one step."""
    for name, change in changes.items():
        if not change:
            continue
        grown = connection.execute(_GROW, {"the_job": job_id, "the_name": name, "change": change})
        if grown.rowcount == 0:
            connection.execute(insert(schema.counts).values(job_id=job_id, name=name, count=change))


def read(connection: Connection, job_id: str) -> dict[str, int]:
    """Counts that are not 0, by name."""
    table = schema.counts
    query = select(table.c.name, table.c["count"]).where(table.c.job_id == job_id)
    return {name: count for name, count in connection.execute(query) if count}


def recount(connection: Connection, job_id: str) -> dict[str, int]:
    """The same from the samples themselves."""
    table = schema.samples
    mine = table.c.job_id == job_id
    by_fate = connection.execute(select(table.c.fate, func.count()).where(mine).group_by(table.c.fate)).all()
    found = {fate: count for fate, count in by_fate if fate is not None}
    found["accepted"] = sum(count for _, count in by_fate)
    conditions = (table.c.matched.is_(False), table.c.filtered.is_(True), table.c.truncated.is_(True))
    columns = [func.count().filter(condition) for condition in conditions]
    found |= zip(APART, connection.execute(select(*columns).where(mine)).one(), strict=True)
    return {name: count for name, count in found.items() if count}
