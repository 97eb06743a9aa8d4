"""`/stats`: what the engines of a project's jobs have done and are doing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from fastapi import APIRouter

from upweight.server.api.context import Parts, PartsOf, ProjectOf
from upweight.server.api.model_names import job_for_model, served_jobs
from upweight.server.store.jobs import Job

TIMEOUT = 5.0  # seconds that a worker may take to tell its counters
SUMS = ("total_tasks", "total_tokens", "active_tasks", "waiting_queue")
MEANS = ("avg_ttft_ms", "avg_decode_tps", "avg_e2e_latency_ms")
RECENT = 128

router = APIRouter()


@router.get("/stats")
async def stats(parts: PartsOf, project: ProjectOf, model: str | None = None) -> dict[str, Any]:
    """Of the job that `model` names, else of all together; each job's own below `jobs`."""
    if model is not None:
        asked = [await parts.database.read(lambda c: job_for_model(c, project, model))]
    else:
        asked = await parts.database.read(lambda c: served_jobs(c, project))
    told = await told_by_workers(parts, asked)
    return {**together(list(told.values())), "jobs": told}


def together(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums, means weighted by the number of tasks, and the last tasks of several engines."""
    tasks = sum(one.get("total_tasks", 0) for one in each)
    found: dict[str, Any] = {name: sum(one.get(name, 0) for one in each) for name in SUMS}
    for name in MEANS:
        weighted = sum((one.get(name) or 0.0) * one.get("total_tasks", 0) for one in each)
        found[name] = weighted / tasks if tasks else 0.0
    found["recent_tasks"] = [task for one in each for task in one.get("recent_tasks", ())][-RECENT:]
    return found


async def told_by_workers(parts: Parts, asked: Sequence[Job]) -> dict[str, dict[str, Any]]:
    counters = await asyncio.gather(*(_counters(parts, job) for job in asked))
    return {job.id: one for job, one in zip(asked, counters, strict=True) if one is not None}


async def _counters(parts: Parts, job: Job) -> dict[str, Any] | None:
    """None where no worker stands ready."""
    worker = parts.supervisor.worker_of(job.id)
    if worker is None or not worker.alive or worker.state is None or worker.state.version is None:
        return None
    try:
        answer = await worker.client.get("/stats", timeout=TIMEOUT)
    except (httpx.TransportError, RuntimeError):  # it is going away; RuntimeError: its client was closed under the call
        return None
    return answer.json() if answer.status_code == 200 else None
