"""`/v1alpha1/fine_tuning/jobs/{job_id}/…`: status, batches, samples, metrics, progress."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from sqlalchemy import Connection

from upweight.server.api import openapi
from upweight.server.api.context import (
    JobOf,
    Parts,
    PartsOf,
    ProjectOf,
    parse_json,
    parts_of,
    project_of,
    read_body,
    read_small_body,
    repeat_key,
    write_once,
)
from upweight.server.api.progress import explain, progress
from upweight.server.api.uploads import parse_upload
from upweight.server.ascii_json import AsciiJSON
from upweight.server.methods import needs_task
from upweight.server.refusals import invalid
from upweight.server.store import batches, jobs
from upweight.server.store.jobs import get_job
from upweight.server.store.rows import is_finite32
from upweight.server.store.uploads import Upload
from upweight.server.waiting import Facts, explain_wait

LARGEST_INDEX = 2**31 - 1
MOST_METRICS, LONGEST_METRIC = 500, 250  # of a call; characters of a name
QUICKLY_READ = 256 * 1024  # bytes of an upload that are read at once: it takes less than a millisecond
Since = Annotated[int, Query(ge=-1, le=LARGEST_INDEX)]

router = APIRouter(prefix="/v1alpha1/fine_tuning/jobs/{job_id}")


@router.get("/status")
async def get_status(job_id: str, parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    def find(connection: Connection) -> tuple[jobs.Job, Any]:
        job = get_job(connection, job_id, project)
        return job, batches.get_batch(connection, job.id, job.filled_batches)

    job, current = await parts.database.read(find)  # one trip: this call is asked for all the time
    parts.contacts.note(job.id, "status")
    return {
        "object": "fine_tuning.job.status",
        "inference_version": job.inference_version,
        "total_batches": job.total_batches,
        "filled_batches": job.filled_batches,
        "batch_size": job.batch_size,
        "job_status": job.job_status,
        "reason": explain(job, current.sample_count if current is not None else 0),
        "error": job.error,
    }


@router.get("/progress")
async def get_progress(job: JobOf, parts: PartsOf, since: Since = -1) -> dict[str, Any]:
    return await parts.database.read(lambda c: progress(c, job, parts.supervisor.worker_of(job.id), since))


@router.get("/waiting")
async def get_waiting(job: JobOf, parts: PartsOf) -> dict[str, Any]:
    """What the job waits for, over rollouts, server, engine and trainer."""
    current = await parts.database.read(lambda c: batches.get_batch(c, job.id, job.filled_batches))
    worker = parts.supervisor.worker_of(job.id)
    state = worker.state if worker is not None and worker.alive else None
    facts = Facts(
        job_id=job.id,
        job_status=job.job_status,
        reason=job.reason,
        batch_index=job.filled_batches,
        in_batch=current.sample_count if current is not None else 0,
        batch_size=job.batch_size,
        places=parts.settings.max_running,
        seconds_up=parts.contacts.seconds_up,
        status_age=parts.contacts.age(job.id, "status"),
        completion_age=parts.contacts.age(job.id, "completion"),
        upload_age=parts.contacts.age(job.id, "upload"),
        phase=None if state is None else str(state.phase),
        detail="" if state is None else state.detail,
        active=0 if state is None else int(state.stats.get("active_tasks", 0)),
        queued=0 if state is None else int(state.stats.get("waiting_queue", 0)),
        tokens_per_second=0.0 if worker is None else worker.tokens_per_second,
        has_file=job.method_type != "reinforcement",
    )
    return explain_wait(facts)


@router.get("/batches/{batch_index}")
async def get_batch(batch_index: int, job: JobOf, parts: PartsOf) -> dict[str, Any]:
    return await parts.database.read(lambda c: batches.read_batch(c, job, batch_index))


@router.post("/batches", openapi_extra=openapi.BATCH)
async def create_batch(request: Request, job: JobOf, parts: PartsOf, project: ProjectOf) -> dict[str, Any]:
    body = await read_small_body(request)
    index = _index(parse_json(body), "index")
    answer, _ = await write_once(
        request, project, body, lambda c: batches.create_batch(c, get_job(c, job.id, project), index)
    )
    return answer


class _DirectRoute(APIRoute):
    """Calls `submit_samples` itself: resolving its parameters by FastAPI takes as long as storing a sample."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        through_fastapi = super().get_route_handler()

        async def handler(request: Request) -> Response:
            index = request.path_params["batch_index"]
            if not (index.isascii() and index.isdecimal() and len(index) < 20):
                return await through_fastapi(request)  # which says what is wrong
            project = await project_of(request)
            job_id, parts = request.path_params["job_id"], parts_of(request)
            return AsciiJSON(await submit_samples(request, job_id, int(index), parts, project))

        return handler


uploads = APIRouter(prefix=router.prefix, route_class=_DirectRoute)


@uploads.post("/batches/{batch_index}/samples", openapi_extra=openapi.SAMPLES)
async def submit_samples(
    request: Request, job_id: str, batch_index: int, parts: PartsOf, project: ProjectOf
) -> dict[str, Any]:
    named = await _names_groups(parts, project, job_id)
    parts.contacts.note(job_id, "upload")
    body = await read_body(request)
    is_small = len(body) <= QUICKLY_READ
    await parts.upload_turns.take()
    samples = parse_upload(body, named) if is_small else await parts.reader.read(body, named)
    key, digest = repeat_key(request, b"".join(sample.content_hash for sample in samples))
    upload = Upload(
        job_id=job_id, project=project, batch_index=batch_index, samples=samples, key=key, request_hash=digest
    )
    answer = await parts.database.write(upload)
    await parts.upload_turns.take()  # many are stored together, and would answer together too
    if answer["status"] == "filled":
        parts.supervisor.batch_filled(job_id)
    return answer


async def _names_groups(parts: Parts, project: str, job_id: str) -> bool:
    """Whether samples of the job must name their groups; asked of the store once a job. Raises Refusal 404."""
    place = project, job_id
    if place not in parts.needs_task:
        job = await parts.database.read(lambda c: get_job(c, job_id, project))
        parts.needs_task[place] = needs_task(job.settings)
    return parts.needs_task[place]


@router.post("/metrics", openapi_extra=openapi.METRICS)
async def add_metrics(request: Request, job: JobOf, project: ProjectOf) -> dict[str, Any]:
    body = await read_small_body(request)
    given = parse_json(body)
    index, metrics = _index(given, "batch_index"), given.get("metrics")
    if not isinstance(metrics, dict) or not metrics:
        raise invalid(("body", "metrics"), "metrics must be an object {name: number}")
    if len(metrics) > MOST_METRICS:
        text = f"metrics has {len(metrics)} names, the limit is {MOST_METRICS}; send means, not single values"
        raise invalid(("body", "metrics"), text)
    for name, value in metrics.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not is_finite32(value):
            raise invalid(
                ("body", "metrics", name), f"metric {name!r} = {value!r}: a finite number of 32 bits is needed"
            )
        if not name.isprintable() or len(name) > LONGEST_METRIC:
            text = f"metric name {name[:LONGEST_METRIC]!r}: at most {LONGEST_METRIC} printable characters are needed"
            raise invalid(("body", "metrics", name[:LONGEST_METRIC]), text)

    def effect(connection: Any) -> dict[str, Any]:
        jobs.add_client_metrics(connection, job.id, index, metrics)
        return {"object": "fine_tuning.metrics"}

    answer, _ = await write_once(request, project, body, effect)
    return answer


def _index(given: dict[str, Any], field: str) -> int:
    index = given.get(field)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index <= LARGEST_INDEX:
        raise invalid(("body", field), f"{field} = {index!r}: an integer from 0 to {LARGEST_INDEX} is needed")
    return index
