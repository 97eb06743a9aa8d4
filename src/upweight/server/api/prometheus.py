"""`/metrics`: the numbers of a project's jobs and engines in the text format that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from sqlalchemy import Connection

from upweight.server.api.context import PartsOf, ProjectOf
from upweight.server.api.model_names import served_jobs
from upweight.server.api.stats import told_by_workers
from upweight.server.store import versions
from upweight.server.store.jobs import Job

Newest = Mapping[str, Mapping[str, float]]  # job → metrics of its newest version

router = APIRouter()


@router.get("/metrics")
async def metrics(parts: PartsOf, project: ProjectOf) -> Response:
    def look(connection: Connection) -> tuple[list[Job], Newest]:
        jobs = served_jobs(connection, project)
        return jobs, {job.id: versions.newest_metrics(connection, job.id) for job in jobs if not job.is_over}

    jobs, newest = await parts.database.read(look)
    counters = await told_by_workers(parts, jobs)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(jobs, newest, counters))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Numbers:
    """What one request gets, in the form of a collector."""

    def __init__(self, jobs: Sequence[Job], newest: Newest, counters: Mapping[str, Mapping[str, Any]]) -> None:
        self._jobs, self._newest, self._counters = jobs, newest, counters

    def collect(self) -> Iterator[GaugeMetricFamily]:
        running = [job for job in self._jobs if not job.is_over]
        status = [((job.id, job.job_status), 1.0) for job in self._jobs]
        yield _gauge("upweight_job_status", "1 for the present status of a job", ("job", "status"), status)
        filled = [((job.id,), float(job.filled_batches)) for job in running]
        yield _gauge("upweight_job_filled_batches", "batches that are full", ("job",), filled)
        served = [((job.id,), float(job.inference_version)) for job in running if job.inference_version is not None]
        yield _gauge("upweight_job_inference_version", "version that is served", ("job",), served)
        trained = [((job, name), value) for job, told in self._newest.items() for name, value in told.items()]
        yield _gauge("upweight_job_metric", "training metrics of the newest version", ("job", "name"), trained)
        yield from self._engines()

    def _engines(self) -> Iterator[GaugeMetricFamily]:
        names = sorted({name for told in self._counters.values() for name, value in told.items() if _is_number(value)})
        for name in names:
            values = [((job,), float(told[name])) for job, told in self._counters.items() if _is_number(told.get(name))]
            yield _gauge(f"upweight_engine_{name}", "of the engine that serves a job", ("job",), values)
        by_version = [
            ((job, str(version)), float(tokens))
            for job, told in self._counters.items()
            for version, tokens in told.get("tokens_by_version", {}).items()
        ]
        what = "tokens drawn from a version"
        yield _gauge("upweight_engine_tokens_by_version", what, ("job", "version"), by_version)


def _gauge(
    name: str, what: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=labels)
    for label, value in values:
        family.add_metric(label, value)
    return family


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
