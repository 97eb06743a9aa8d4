"""Jobs and checkpoints as they go over the wire. Readable for clients that know the six public states only."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from upweight.server.api.progress import explain
from upweight.server.file_methods import CONTRACT_CONTEXT
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
        "fine_tuned_model": job.id if job.weights is not None else None,  # what requests to /v1 call it
        "status": job.job_status if job.job_status in PUBLIC_STATES else "running",
        "error": job.error,
        "training_file": request.get("training_file", ""),
        "validation_file": request.get("validation_file"),
        **_method_answer(job),
        "integrations": request.get("integrations") or None,
        "from_checkpoint": request.get("from_checkpoint"),
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


def _method_answer(job: Job) -> dict[str, Any]:
    """The method as every client can read it, and whole in `training_method`."""
    kind, settings = job.method_type, job.settings
    if kind == "reinforcement":
        return {"hyperparameters": None, "method": None, "training_method": {"type": kind, kind: settings}}
    given = settings["hyperparameters"]
    whole = {"type": kind, kind: {"hyperparameters": given}}
    # An unmodified public client knows supervised methods alone, and of those no context below the contract's.
    plain = kind == "supervised" and given["context_length"] >= CONTRACT_CONTEXT
    return {
        "hyperparameters": given if plain else None,
        "method": whole if plain else None,
        "training_method": whole,
    }


# Metrics of a version → those of a checkpoint.
MEASURED = {
    "token_accuracy": "train_mean_token_accuracy",
    "valid_loss": "valid_loss",
    "valid_token_accuracy": "valid_mean_token_accuracy",
}


def checkpoint_answer(row: Row) -> dict[str, Any]:
    """The single form; items of a list have `result_files` besides."""
    told = {"train_loss": row.metrics.get("loss"), "step": float(row.version)}
    told |= {theirs: row.metrics[ours] for ours, theirs in MEASURED.items() if ours in row.metrics}
    return {
        "id": checkpoint_id_of(row.job_id, row.version),
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(row.created_at),
        "fine_tuned_model_checkpoint": row.checkpoint,
        "fine_tuning_job_id": row.job_id,
        "metrics": told,
        "step_number": row.version,
    }


def checkpoint_id_of(job_id: str, version: object) -> str:
    return f"ftckpt-{job_id}-{version}"


def checkpoint_version(job_id: str, checkpoint_id: str) -> int:
    number = checkpoint_id.removeprefix(checkpoint_id_of(job_id, ""))
    if not number.isdecimal() or len(number) > LONGEST_NUMBER:
        raise not_found("checkpoint", checkpoint_id)
    return int(number)
