"""What a worker is told to train on next: uploaded samples travel with the order, rows of its file the worker has itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from upweight.server.methods import needs_task
from upweight.server.store.database import Database
from upweight.server.store.jobs import Job
from upweight.server.supervision.training_data import build_batch, join_batch
from upweight.server.worker_protocol import encode_batch


@dataclass(frozen=True, kw_only=True)
class Order:
    """Batch `index` of a job."""

    index: int
    body: bytes  # empty: the worker reads the batch from the job's file
    num_samples: int
    sample_seqs: list[int]  # rows of the samples in the store, in batch order; none for rows of a file
    metrics: dict[str, float]  # what the server itself knows of the batch
    nothing_to_compare: bool = False  # the job compares the samples of a task, and each is the only one of its own


async def next_order(database: Database, job: Job, index: int) -> Order:
    """The order to train on batch `index`; the same one whenever it is made again."""
    if job.method_type != "reinforcement":
        rows = rows_of_batch(job, index)
        return Order(index=index, body=b"", num_samples=rows, sample_seqs=[], metrics={"samples": float(rows)})
    await database.write(lambda c: join_batch(c, job.id, index, max_tokens=job.settings["sampling"]["max_tokens"]))
    built = await database.read(lambda c: build_batch(c, job.id, index))
    return Order(
        index=index,
        body=await asyncio.to_thread(encode_batch, built.batch),
        num_samples=built.batch.num_samples,
        sample_seqs=built.sample_seqs,
        metrics=built.metrics,
        nothing_to_compare=needs_task(job.settings) and built.only_lone_samples,
    )


def rows_of_batch(job: Job, index: int) -> int:
    """How many rows of the file batch `index` holds: the last one of an epoch may hold fewer."""
    rows, size = job.settings["rows"], job.batch_size
    per_epoch = -(-rows // size)
    return min(size, rows - index % per_epoch * size)
