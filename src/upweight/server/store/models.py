"""Models promoted from checkpoints: weights of their own, served by id or name, and start models of new jobs.

To the parts that serve, a model is a job that succeeded: `as_job`.
"""

from __future__ import annotations

import secrets
import time

from sqlalchemy import Connection, Row, delete, insert, or_, select

from upweight.server.refusals import Refusal
from upweight.server.store import schema
from upweight.server.store.jobs import Job

PROMOTED = "promoted"  # `method_type` of a model as a job


def new_model_id() -> str:
    return "ftmodel-" + secrets.token_hex(12)


def add_model(
    connection: Connection, *, model_id: str, name: str, job: Job, version: int, fingerprint: str, path: str
) -> Row:
    """Raises Refusal 409 if the project has a model of this name."""
    if find_model(connection, job.project, name) is not None:
        raise Refusal(409, f"model {name!r} exists already; give another name")
    settings = {**job.settings, "lora": None}  # the adapter is merged into the weights
    row = {"id": model_id, "project": job.project, "name": name, "job_id": job.id, "version": version, "path": path}
    more = {"created_at": time.time(), "fingerprint": fingerprint, "settings": settings}
    connection.execute(insert(schema.models).values(**row, **more))
    found = find_model(connection, job.project, model_id)
    assert found is not None
    return found


def find_model(connection: Connection, project: str, name: str) -> Row | None:
    """The model with this id or name."""
    table = schema.models
    named = or_(table.c.id == name, table.c.name == name)
    return connection.execute(select(table).where(table.c.project == project, named)).first()


def delete_model(connection: Connection, row: Row) -> None:
    """Raises Refusal 409 while a job needs its weights: to train, or to be served."""
    table = schema.jobs
    needing = select(table.c.id).where(
        table.c.model_path == row.path, table.c.job_status.not_in(("failed", "cancelled"))
    )
    if (job_id := connection.scalar(needing.limit(1))) is not None:
        raise Refusal(
            409, f"model {row.name!r} is the start model of job {job_id}, which needs it; cancel the job first"
        )
    connection.execute(delete(schema.models).where(schema.models.c.id == row.id))


def list_models(connection: Connection, project: str) -> list[Row]:
    """Newest first."""
    table = schema.models
    return list(connection.execute(select(table).where(table.c.project == project).order_by(table.c.seq.desc())))


def as_job(row: Row) -> Job:
    return Job(
        seq=row.seq,
        id=row.id,
        project=row.project,
        created_at=row.created_at,
        started_at=row.created_at,
        finished_at=row.created_at,
        job_status="succeeded",
        reason=f"version {row.version} of job {row.job_id}",
        model=row.name,
        model_path=row.path,
        request={"model_name": row.name, "method_type": PROMOTED, "fingerprint": row.fingerprint},
        settings=row.settings,
        batch_size=row.settings["batch_size"],
        total_batches=0,
        filled_batches=0,
        inference_version=row.version,
        error=None,
        weights=row.path,
    )
