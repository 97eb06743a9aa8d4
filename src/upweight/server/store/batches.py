"""Batches and their samples.

Invariants:
* A sample id enters a job once. The same id with the same content changes nothing; with other content it is refused (422).
* A batch never holds more than `batch_size` samples: an upload whose new ids do not all fit is refused whole (409).
* Batches fill in order, and `filled_batches` grows in the transaction that stores the last sample of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict

from sqlalchemy import Connection, Row, bindparam, insert, select, update
from sqlalchemy.exc import IntegrityError

from upweight.server.refusals import Refusal, not_found
from upweight.server.store import counts, schema
from upweight.server.store.jobs import TERMINAL, Job, get_job
from upweight.server.store.rows import NewSample

IDS_PER_QUERY = 500

# Statements of every upload, made once: making one takes longer than running it.
_THIS_BATCH = (
    schema.batches.c.job_id == bindparam("the_job"),
    schema.batches.c.batch_index == bindparam("the_index"),
)
_GET_BATCH = select(schema.batches).where(*_THIS_BATCH)
_SET_COUNT = (
    update(schema.batches).where(*_THIS_BATCH).values(sample_count=bindparam("held"), filled_at=bindparam("at"))
)
_GET_HASHES = select(schema.samples.c.id, schema.samples.c.content_hash).where(
    schema.samples.c.job_id == bindparam("the_job"), schema.samples.c.id.in_(bindparam("ids", expanding=True))
)
_INSERT_SAMPLES = insert(schema.samples)


def get_batch(connection: Connection, job_id: str, index: int) -> Row | None:
    if not 0 <= index < 2**63:  # what an INTEGER column can hold
        return None
    return connection.execute(_GET_BATCH, {"the_job": job_id, "the_index": index}).first()


def batch_answer(job: Job, batch: Row) -> dict:
    """The batch as it goes over the wire."""
    return _answer(job, batch.batch_index, batch.sample_count)


def _answer(job: Job, index: int, count: int) -> dict:
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
    _refuse_if_closed(job)
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


def add_samples(connection: Connection, job_id: str, project: str, index: int, samples: list[NewSample]) -> dict:
    """Store the samples that are new to the job, all or none, and return the batch. Raises Refusal 404, 409 or 422."""
    job = get_job(connection, job_id, project)
    batch = get_batch(connection, job_id, index)
    if batch is None:
        raise not_found("batch", index)
    new = _new_samples(connection, job_id, samples)
    if not new:
        return batch_answer(job, batch)
    _refuse_if_closed(job)
    free = job.batch_size - batch.sample_count
    if len(new) > free:
        raise Refusal(
            409,
            f"batch {index} has {free} free places of {job.batch_size}, the upload brings {len(new)} new samples; nothing was stored",
            sample_count=batch.sample_count,
            batch_size=job.batch_size,
        )
    _insert(connection, job_id, index, new)
    counts.add(connection, job_id, {"accepted": len(new)})
    count = batch.sample_count + len(new)
    _count(connection, job, index, count)
    return _answer(job, index, count)


def _refuse_if_closed(job: Job) -> None:
    if job.method_type != "reinforcement":
        raise Refusal(409, f"job {job.id} is of type {job.method_type}: it trains on its file and takes no samples")
    if job.job_status in TERMINAL:
        raise Refusal(409, f"job {job.id} is {job.job_status}: it takes no more samples")


def _new_samples(connection: Connection, job_id: str, samples: list[NewSample]) -> list[NewSample]:
    """The samples whose ids the job does not hold yet, each id once, in order. Raises Refusal 422 on changed content."""
    known = _hashes(connection, job_id, (sample.id for sample in samples))
    new: dict[str, NewSample] = {}
    for position, sample in enumerate(samples):
        stored = known.get(sample.id) or (new[sample.id].content_hash if sample.id in new else None)
        if stored is None:
            new[sample.id] = sample
        elif stored != sample.content_hash:
            message = f"sample {sample.id!r} is already stored with other content; use a new id for other content"
            raise Refusal(422, [{"loc": ["body", "samples", position, "id"], "msg": message, "type": "id_conflict"}])
    return list(new.values())


def _hashes(connection: Connection, job_id: str, ids: Iterable[str]) -> dict[str, bytes]:
    wanted = list(dict.fromkeys(ids))
    found: dict[str, bytes] = {}
    for start in range(0, len(wanted), IDS_PER_QUERY):
        some = wanted[start : start + IDS_PER_QUERY]
        found.update(
            {row.id: row.content_hash for row in connection.execute(_GET_HASHES, {"the_job": job_id, "ids": some})}
        )
    return found


def _insert(connection: Connection, job_id: str, index: int, samples: list[NewSample]) -> None:
    rows = [{"job_id": job_id, "batch_index": index, **asdict(sample)} for sample in samples]
    try:
        connection.execute(_INSERT_SAMPLES, rows)
    except IntegrityError as error:
        raise Refusal(422, f"a sample cannot be stored: {error.orig}") from error


def _count(connection: Connection, job: Job, index: int, count: int) -> None:
    filled = count == job.batch_size
    values = {"held": count, "at": time.time() if filled else None}
    connection.execute(_SET_COUNT, {"the_job": job.id, "the_index": index, **values})
    if filled:
        jobs = schema.jobs
        connection.execute(update(jobs).where(jobs.c.id == job.id).values(filled_batches=jobs.c.filled_batches + 1))
