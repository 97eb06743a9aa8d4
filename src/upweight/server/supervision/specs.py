"""What a worker is told at its start, and where it logs."""

from __future__ import annotations

from pathlib import Path

from upweight.server.home import Home
from upweight.server.settings import Settings
from upweight.server.store.jobs import Job
from upweight.server.worker_protocol import WorkerMode, WorkerSpec


def worker_spec(job: Job, home: Home, mode: WorkerMode, checkpoint: str | None, settings: Settings) -> WorkerSpec:
    return WorkerSpec(
        job_id=job.id,
        mode=mode,
        model=job.model_path,
        model_names=model_names(job),
        method_type=job.method_type,
        settings=job.settings,
        training_file=str(home.job_folder(job.id) / home.TRAINING_FILE) if "rows" in job.settings else None,
        validation_file=str(home.job_folder(job.id) / home.VALIDATION_FILE)
        if "validation_rows" in job.settings
        else None,
        socket="",  # chosen by start_worker
        folder=str(home.job_folder(job.id)),
        checkpoint=checkpoint,
        cache_folder=str(home.cache / "compiled"),
        request_timeout=settings.inference_timeout,
        warm_up=settings.worker_warm_up,
    )


def model_names(job: Job) -> list[str]:
    """What requests may call the job's model: as when the job was created, its own name, their last parts, the job's id."""
    names = [job.model, job.request["model_name"]]
    return list(dict.fromkeys([*names, *(Path(name).name or name for name in names), job.id]))


def log_file(home: Home, job_id: str) -> Path:
    return home.logs / f"{job_id}.log"
