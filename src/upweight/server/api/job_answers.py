"""Jobs and checkpoints as they go over the wire. Readable for clients that know the six public states only."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from upweight.server.api.progress import explain
from upweight.server.refusals import not_found
from upweight.server.store import batches, versions
from upweight.server.store.jobs import TERMINAL, Job

LONGEST_NUMBER = 18  # digits that fit into a column
PUBLIC_STATES = frozenset({"queued"}) | TERMINAL


def job_answer(connection: Connection, job: Job) -> dict[str, Any]:
    current = batches.get_batch(connection, job.id, job.filled_batches)
    request = job.request
    return {
        **request.get("unknown", {}),  # kept and given back, without any effect
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_at),
        "finished_at": int(job.finished_at) if job.finished_at is not None else None,
        "model": job.model,
        "status": job.job_status if job.job_status in PUBLIC_STATES else "running",
        "error": job.error,
        "training_file": request.get("training_file", ""),
        "validation_file": request.get("validation_file"),
        "hyperparameters": None,
        "method": None,  # an unmodified public client knows no reinforcement method; it is in training_method
        "training_method": {"type": "reinforcement", "reinforcement": job.settings},
        "integrations": None,
        "from_checkpoint": None,
        "organization_id": "",
        "result_files": [],
        "seed": job.settings["seed"],
        "suffix": request.get("suffix"),
        "tags": request.get("tags"),
        "trained_tokens": int(versions.total(connection, job.id, "trained_tokens")),
        "trained_steps": versions.newest_version(connection, job.id) or 0,
        "total_steps": job.total_batches,
        "estimated_finish": None,
        "batch_size": job.batch_size,
        "job_status": job.job_status,
        "reason": explain(job, current.sample_count if current is not None else 0),
        "weights": job.weights,
    }


def checkpoint_answer(row: Row) -> dict[str, Any]:
    """The single form; items of a list have `result_files` besides."""
    loss = row.metrics.get("loss")
    return {
        "id": f"ftckpt-{row.job_id}-{row.version}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(row.created_at),
        "fine_tuned_model_checkpoint": row.checkpoint,
        "fine_tuning_job_id": row.job_id,
        "metrics": {"step": float(row.version), "train_loss": loss},
        "step_number": row.version,
    }


def checkpoint_version(job_id: str, checkpoint_id: str) -> int:
    number = checkpoint_id.removeprefix(f"ftckpt-{job_id}-")
    if not number.isdecimal() or len(number) > LONGEST_NUMBER:
        raise not_found("checkpoint", checkpoint_id)
    return int(number)
