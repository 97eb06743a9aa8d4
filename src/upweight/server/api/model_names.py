"""Model names of requests → jobs. A job's model is called by the job's id or by the names of the model it started from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from upweight.server.refusals import Refusal
from upweight.server.store import jobs, models
from upweight.server.store.jobs import Job
from upweight.server.supervision.specs import model_names

MOST_JOBS = 1000


def served_jobs(connection: Connection, project: str) -> list[Job]:
    """Jobs whose model can be asked, newest first, then the models that were promoted."""
    found, _ = jobs.list_jobs(connection, project, limit=MOST_JOBS, after=None)
    promoted = [models.as_job(row) for row in models.list_models(connection, project)]
    return [job for job in found if job.job_status not in ("failed", "cancelled")] + promoted


def as_of_now(connection: Connection, job: Job) -> Job:
    """The job as the store has it now; a promoted model stays as it is."""
    return job if job.method_type == models.PROMOTED else jobs.get_job(connection, job.id)


def job_for_model(connection: Connection, project: str, name: Any, *, unknown: int = 400) -> Job:
    """The job that a request with this model name means. Raises Refusal naming what is served: `unknown` if there is none, or 400.

    A name that several jobs share means the one that is not over; without a name the only job is meant.
    """
    if name is not None and not isinstance(name, str):
        raise Refusal(400, f"model is {str(name)[:80]}; it must be text")
    candidates = served_jobs(connection, project)
    served = "; ".join(_told(job) for job in candidates[:10]) or "nothing: create a job first"
    if name is None:
        meant, problem = candidates, "model is missing and several models are served"
    else:
        meant = [job for job in candidates if job.id == name] or [job for job in candidates if name in model_names(job)]
        problem = f"model {name!r} is the name of several jobs; ask for one by its id"
    if not meant:
        what = "no model is served here" if name is None else f"model {name[:200]!r} is not served here"
        raise Refusal(unknown, f"{what}; served: {served}")
    return _the_one(meant, f"{problem}; served: {served}")


def _the_one(meant: Sequence[Job], otherwise: str) -> Job:
    running = [job for job in meant if not job.is_over]
    if len(meant) == 1:
        return meant[0]
    if len(running) == 1:
        return running[0]
    raise Refusal(400, otherwise)


def _told(job: Job) -> str:
    return f"{job.id} ({job.model})"
