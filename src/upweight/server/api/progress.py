"""How a job stands, in one document: for people, the command line and the web page."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from upweight.server.store import batches, jobs, versions
from upweight.server.store.jobs import Job
from upweight.server.supervision.worker_process import WorkerProcess


def progress(connection: Connection, job: Job, worker: WorkerProcess | None, since: int = -1) -> dict[str, Any]:
    """`version` is the newest recorded one, `inference_version` the announced one; `worker` is null when none runs.

    `since`: only versions above it are listed, so that a page that polls need not read them again.
    """
    current = batches.get_batch(connection, job.id, job.filled_batches)
    in_batch = current.sample_count if current is not None else 0
    return {
        "object": "fine_tuning.job.progress",
        "job_id": job.id,
        "job_status": job.job_status,
        "reason": explain(job, in_batch),
        "error": job.error,
        "version": versions.newest_version(connection, job.id),
        "inference_version": job.inference_version,
        "filled_batches": job.filled_batches,
        "total_batches": job.total_batches,
        "batch_size": job.batch_size,
        "in_batch": in_batch,
        "versions": [_version(row) for row in versions.versions_since(connection, job.id, since)],
        "client_metrics": jobs.client_metrics(connection, job.id),
        "ledger": _ledger(connection, job),
        "weights": job.weights,
        "worker": _worker(worker),
    }


def _ledger(connection: Connection, job: Job) -> dict[str, int]:
    if job.method_type == "reinforcement":
        return versions.ledger(connection, job.id)
    return versions.file_ledger(connection, job.id, job.settings)


def explain(job: Job, in_batch: int) -> str:
    """What the job waits for or does, in words."""
    if job.job_status == "waiting_for_samples":
        return f"batch {job.filled_batches} holds {in_batch} of {job.batch_size} samples"
    return job.reason


def _version(row: Any) -> dict[str, Any]:
    return {
        "version": row.version,
        "created_at": row.created_at,
        "fingerprint": row.fingerprint,
        "update_skipped": row.update_skipped,
        "seconds": row.seconds,
        "checkpoint": row.checkpoint,
        "metrics": row.metrics,
    }


def _worker(worker: WorkerProcess | None) -> dict[str, Any] | None:
    if worker is None or worker.state is None:
        return None
    return {"pid": worker.pid, "tokens_per_second": worker.tokens_per_second, **worker.state.model_dump(mode="json")}
