"""Batches: opened in order, each once. What fills them is in `uploads`."""

from __future__ import annotations

import time

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from upweight.server.refusals import Refusal, not_found
from upweight.server.store import schema
from upweight.server.store.jobs import TERMINAL, Job

# Statements of every upload, made once: making one takes longer than running it.
_THIS_BATCH = (
    schema.batches.c.job_id == bindparam("the_job"),
    schema.batches.c.batch_index == bindparam("the_index"),
)
_GET_BATCH = select(schema.batches).where(*_THIS_BATCH)
_SET_COUNT = (
    update(schema.batches).where(*_THIS_BATCH).values(sample_count=bindparam("held"), filled_at=bindparam("at"))
)


def get_batch(connection: Connection, job_id: str, index: int) -> Row | None:
    if not 0 <= index < 2**63:  # what an INTEGER column can hold
        return None
    return connection.execute(_GET_BATCH, {"the_job": job_id, "the_index": index}).first()


def batch_answer(job: Job, batch: Row) -> dict:
    """The batch as it goes over the wire."""
    return answer_of(job, batch.batch_index, batch.sample_count)


def answer_of(job: Job, index: int, count: int) -> dict:
    return {
        "object": "fine_tuning.batch",
        "index": index,
        "status": "filled" if count == job.batch_size else "filling",
        "sample_count": count,
        "batch_size": job.batch_size,
    }


def read_batch(connection: Connection, job: Job, index: int) -> dict:
    batch = get_batch(connection, job.id, index)
    if batch is None:
        raise not_found("batch", index)
    return batch_answer(job, batch)


def create_batch(connection: Connection, job: Job, index: int) -> dict:
    """Open batch `index`; the same index again returns the batch as it is."""
    if (present := get_batch(connection, job.id, index)) is not None:
        return batch_answer(job, present)
    refuse_if_closed(job)
    if job.total_batches is not None and index >= job.total_batches:
        raise Refusal(
            409, f"batch {index} does not belong to job {job.id}: it has {job.total_batches} batches (from 0)"
        )
    if index > job.filled_batches:
        raise Refusal(
            409, f"batch {index} cannot be opened: batches fill in order and batch {job.filled_batches} is next"
        )
    connection.execute(
        insert(schema.batches).values(job_id=job.id, batch_index=index, sample_count=0, created_at=time.time())
    )
    return read_batch(connection, job, index)


def refuse_if_closed(job: Job) -> None:
    if job.method_type != "reinforcement":
        raise Refusal(409, f"job {job.id} is of type {job.method_type}: it trains on its file and takes no samples")
    if job.job_status in TERMINAL:
        raise Refusal(409, f"job {job.id} is {job.job_status}: it takes no more samples")


def set_count(connection: Connection, job: Job, index: int, count: int, *, at: float) -> None:
    """The batch holds `count` samples since `at`; with `batch_size` it is filled."""
    filled = count == job.batch_size
    values = {"held": count, "at": at if filled else None}
    connection.execute(_SET_COUNT, {"the_job": job.id, "the_index": index, **values})
    if filled:
        jobs = schema.jobs
        connection.execute(update(jobs).where(jobs.c.id == job.id).values(filled_batches=jobs.c.filled_batches + 1))
