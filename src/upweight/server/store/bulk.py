"""Many rows of one table in few statements: each has places for several rows.

SQLAlchemy's own way takes as long for a row as the database does, and SQLite's driver gives the interpreter away, and waits for it,
with each row of an `executemany`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import JSON, Connection, Dialect, Table, bindparam, insert

ROWS = 32  # a statement; of up to a thousand values then, where SQLite takes 32,766 and PostgreSQL 65,535


def insert_many(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """`rows`: column → value, all of the same columns. Raises what the database raises."""
    if not rows:
        return
    columns = tuple(column.name for column in table.columns if column.name in rows[0])
    of = itemgetter(*columns)
    texts = [position for position, name in enumerate(columns) if isinstance(table.c[name].type, JSON)]
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        values: list[Any] = []
        for row in some:
            one = list(of(row))
            for position in texts:
                one[position] = json.dumps(one[position])
            values += one
        text, places = _statement(connection.dialect, table, columns, len(some))
        connection.exec_driver_sql(text, tuple(values) if places is None else dict(zip(places, values, strict=True)))


@functools.lru_cache(maxsize=4 * ROWS)
def _statement(dialect: Dialect, table: Table, columns: tuple[str, ...], count: int) -> tuple[str, list[str] | None]:
    """The text for `count` rows, and the names of its places where the database's driver names them."""
    places = [[f"{name}_{number}" for name in columns] for number in range(count)]
    rows: list[dict[str, Any]] = [
        {name: bindparam(place) for name, place in zip(columns, row, strict=True)} for row in places
    ]
    compiled: Any = insert(table).values(rows).compile(dialect=dialect)
    flat = [place for row in places for place in row]
    if not compiled.positional:
        return compiled.string, flat
    assert compiled.positiontup == flat, "values stand in the order of the table's columns"
    return compiled.string, None
