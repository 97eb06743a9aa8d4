"""Jobs, their states and their events."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from upweight.server.refusals import Refusal, not_found
from upweight.server.store import schema

METRICS_TOLD = 20  # in the words of an event; its data has all
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
_PAST = {"succeeded": "has succeeded", "failed": "has failed", "cancelled": "was cancelled"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A row of the table of jobs."""

    seq: int
    id: str
    project: str
    created_at: float
    started_at: float | None
    finished_at: float | None
    job_status: str
    reason: str
    model: str
    model_path: str
    request: dict[str, Any]
    settings: dict[str, Any]  # what it trains with: the validated method, defaults filled in
    batch_size: int
    total_batches: int | None
    filled_batches: int
    inference_version: int | None
    error: dict[str, Any] | None
    weights: str | None

    @property
    def method_type(self) -> str:
        """reinforcement, supervised or dpo."""
        return str(self.request.get("method_type", "reinforcement"))

    @property
    def is_over(self) -> bool:
        return self.job_status in TERMINAL


def new_job_id() -> str:
    return "ftjob-" + secrets.token_hex(12)


def create_job(
    connection: Connection,
    *,
    project: str,
    model: str,
    model_path: str,
    request: dict,
    settings: dict,
    job_id: str | None = None,
) -> Job:
    """A job that waits for a place. `settings` with `rows` are those of a job whose batches are all there: its file's."""
    job_id = new_job_id() if job_id is None else job_id
    connection.execute(
        insert(schema.jobs).values(
            id=job_id,
            project=project,
            created_at=time.time(),
            job_status="queued",
            reason="waits for a place",
            model=model,
            model_path=model_path,
            request=request,
            settings=settings,
            batch_size=settings["batch_size"],
            total_batches=settings["num_batches"],
            filled_batches=settings["num_batches"] if "rows" in settings else 0,
        )
    )
    add_event(connection, job_id, "job created")
    return get_job(connection, job_id)


_GET_JOB = select(schema.jobs).where(schema.jobs.c.id == bindparam("the_job"))  # made once: it is asked often


def get_job(connection: Connection, job_id: str, project: str | None = None) -> Job:
    """The job; Refusal 404 if there is none, or if it belongs to another project than the given one."""
    row = connection.execute(_GET_JOB, {"the_job": job_id}).first()
    if row is None or (project is not None and row.project != project):
        raise not_found("job", job_id)
    return _job(row)


def _job(row: Row) -> Job:
    # By the keys of the columns: one of them has another name in the table.
    return Job(**dict(zip(schema.jobs.columns.keys(), row, strict=True)))


def list_jobs(connection: Connection, project: str, *, limit: int, after: str | None) -> tuple[list[Job], bool]:
    """Newest first, at most `limit`, older than job `after`; and whether more follow."""
    table = schema.jobs
    query = select(table).where(table.c.project == project).order_by(table.c.seq.desc()).limit(limit + 1)
    if after is not None:
        query = query.where(table.c.seq < get_job(connection, after, project).seq)
    found = [_job(row) for row in connection.execute(query)]
    return found[:limit], len(found) > limit


def unfinished_jobs(connection: Connection) -> list[Job]:
    """Jobs that are not in a terminal state, oldest first."""
    table = schema.jobs
    query = select(table).where(table.c.job_status.not_in(TERMINAL)).order_by(table.c.seq)
    return [_job(row) for row in connection.execute(query)]


def set_state(connection: Connection, job_id: str, job_status: str, reason: str = "") -> bool:
    """Move a job that is not over to another state. False (and no change) if it is over."""
    table = schema.jobs
    values: dict[str, Any] = {"job_status": job_status, "reason": reason}
    if job_status in TERMINAL:
        values["finished_at"] = time.time()
    changed = connection.execute(
        update(table).where(table.c.id == job_id, table.c.job_status.not_in(TERMINAL)).values(**values)
    )
    return changed.rowcount == 1


def cancel(connection: Connection, job_id: str) -> bool:
    """False if the job is over already."""
    if not set_state(connection, job_id, "cancelled", "cancelled by request"):
        return False
    add_event(connection, job_id, "job cancelled by request")
    return True


def fail(connection: Connection, job_id: str, code: str, message: str) -> None:
    """`code` names the kind of failure in the answer's error object. A job that is over stays as it is."""
    if not set_state(connection, job_id, "failed", message):
        return
    set_fields(connection, job_id, error={"code": code, "message": message, "param": None})
    add_event(connection, job_id, f"job failed: {message}", level="error", data={"code": code})


def succeed(connection: Connection, job_id: str, why: str, weights: str) -> None:
    """`weights`: the folder that they lie in."""
    set_fields(connection, job_id, weights=weights)
    set_state(connection, job_id, "succeeded", why)


def pause(connection: Connection, job_id: str) -> None:
    """Raises Refusal 409 if the job is over."""
    if not _is_paused(connection, job_id):
        set_state(connection, job_id, "paused", "paused by request; resume it to go on")
        add_event(connection, job_id, "job paused by request")


def resume(connection: Connection, job_id: str) -> bool:
    """Whether it was paused, and is queued now. Raises Refusal 409 if the job is over."""
    if not _is_paused(connection, job_id):
        return False
    set_state(connection, job_id, "queued", "waits for a place")
    add_event(connection, job_id, "job resumed by request")
    return True


def _is_paused(connection: Connection, job_id: str) -> bool:
    """Raises Refusal 409 if the job is over."""
    job = get_job(connection, job_id)
    if job.is_over:
        raise Refusal(409, f"job {job_id} is over: it {_PAST[job.job_status]}")
    return job.job_status == "paused"


def set_fields(connection: Connection, job_id: str, **values: Any) -> None:
    connection.execute(update(schema.jobs).where(schema.jobs.c.id == job_id).values(**values))


def announce_version(connection: Connection, job_id: str, version: int) -> None:
    """Publish `version` for inference. It never falls."""
    table = schema.jobs
    lower = table.c.inference_version.is_(None) | (table.c.inference_version < version)
    connection.execute(update(table).where(table.c.id == job_id, lower).values(inference_version=version))


def add_event(
    connection: Connection,
    job_id: str,
    message: str,
    *,
    level: str = "info",
    type: str = "message",
    data: dict[str, Any] | None = None,
) -> None:
    row = {"job_id": job_id, "created_at": time.time(), "level": level, "message": message, "type": type, "data": data}
    connection.execute(insert(schema.events).values(**row))


def add_event_once(connection: Connection, job_id: str, message: str, *, level: str = "info") -> None:
    """As `add_event`, unless the job has an event with this message."""
    table = schema.events
    same = select(table.c.seq).where(table.c.job_id == job_id, table.c.message == message).limit(1)
    if connection.scalar(same) is None:
        add_event(connection, job_id, message, level=level)


def list_events(connection: Connection, job_id: str, *, limit: int, after: str | None) -> tuple[list[dict], bool]:
    """Newest first, at most `limit`, older than event `after`; and whether more follow."""
    table = schema.events
    query = select(table).where(table.c.job_id == job_id).order_by(table.c.seq.desc()).limit(limit + 1)
    if after is not None:
        query = query.where(table.c.seq < _event_seq(after))
    rows = [_event_answer(row._mapping) for row in connection.execute(query)]
    return rows[:limit], len(rows) > limit


def _event_seq(event_id: str) -> int:
    number = event_id.removeprefix("ftevent-")
    if not number.isdecimal() or len(number) > 18:  # digits that fit into a column
        raise Refusal(400, f"after = {event_id!r} is not an event id")
    return int(number)


def _event_answer(row: Any) -> dict[str, Any]:
    return {
        "id": f"ftevent-{row['seq']}",
        "object": "fine_tuning.job.event",
        "created_at": int(row["created_at"]),
        "level": row["level"],
        "message": row["message"],
        "type": row["type"],
        "data": row["data"],
    }


def add_client_metrics(connection: Connection, job_id: str, batch_index: int, metrics: dict[str, float]) -> None:
    row = {"job_id": job_id, "batch_index": batch_index, "created_at": time.time(), "metrics": metrics}
    connection.execute(insert(schema.client_metrics).values(**row))
    told = [f"{name} {value:.6g}" for name, value in islice(metrics.items(), METRICS_TOLD)]
    text = ", ".join([*told, *([f"and {len(metrics) - len(told)} more"] if len(metrics) > len(told) else [])])
    add_event(
        connection, job_id, f"batch {batch_index}: {text}", type="metrics", data={"batch_index": batch_index, **metrics}
    )


def client_metrics(connection: Connection, job_id: str) -> list[dict[str, Any]]:
    table = schema.client_metrics
    query = select(table.c.batch_index, table.c.metrics).where(table.c.job_id == job_id).order_by(table.c.seq)
    return [{"batch_index": row.batch_index, "metrics": row.metrics} for row in connection.execute(query)]


def client_metrics_since(connection: Connection, job_id: str, seq: int) -> list[Row]:
    """Those after row `seq`, oldest first."""
    table = schema.client_metrics
    return list(
        connection.execute(select(table).where(table.c.job_id == job_id, table.c.seq > seq).order_by(table.c.seq))
    )
