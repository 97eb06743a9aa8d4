"""What the API process and a tracker process say to each other: JSON lines over its standard input and output.

| said | answered |
|---|---|
| `Begin` | `{"at": Position, "note": where the metrics go}` |
| `{"rows": [Row, …]}` | `{"at": Position}`: they were handed over |
| `{"end": status of the job}` | `{"done": true}`; the process ends |

Instead of any answer `{"failed": text, "fatal": bool}`, and the process ends; fatal: another try would meet the same. End of input
without `end`: the job goes on later, and so does its run.
"""

from __future__ import annotations

from typing import TypedDict


class Position(TypedDict):
    """What was handed over: versions up to this one, rows of client metrics up to this one."""

    version: int
    client: int


class Row(TypedDict):
    """Metrics of a version, or of the client (`client` is the number of the row) at a batch."""

    step: int
    version: int | None
    client: int | None
    metrics: dict[str, float]


class Begin(TypedDict):
    job_id: str
    kind: str
    shown: dict[str, object]
    secret: dict[str, str]
    folder: str  # the job's
    settings: dict[str, object]  # what it trains with


START: Position = {"version": 0, "client": 0}
END_SECONDS = 30  # that a process has left when its parent is gone


def at_after(at: Position, row: Row) -> Position:
    if row["version"] is not None:
        return {"version": row["version"], "client": at["client"]}
    return {"version": at["version"], "client": row["client"] or 0}
