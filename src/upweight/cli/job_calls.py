"""The calls behind `upweight jobs`: documents as the server sends them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from upweight.cli.documents import CHECKPOINT, JOB, MODEL, PROGRESS, document, page
from upweight.errors import ConfigError

if TYPE_CHECKING:
    from upweight.api_client import TokenFactory

PROMOTE_SECONDS = 900.0  # a process loads the model and writes it
OF_URLS = "/?#%\\"
PAGE = 100  # what the server gives at most at once


def create_job(client: TokenFactory, body: dict[str, Any]) -> dict[str, Any]:
    return document(client.post(client.v1.fine_tuning.jobs.bare_endpoint(), json=body), JOB)


def training_file_id(client: TokenFactory, given: str) -> str:
    """The id of an uploaded file; a path is uploaded first."""
    path = Path(given).expanduser()
    if path.is_file():
        return client.v1.files.create(file=path).id
    if given.startswith("file-"):
        return given
    if path.exists():
        raise ConfigError(f"--training-file {given} is no regular file; give a file of JSON lines")
    raise ConfigError(f"--training-file {given}: no such file; give a file of JSON lines or an uploaded one's id")


def get_job(client: TokenFactory, job_id: str) -> dict[str, Any]:
    return document(client.get(client.v1.fine_tuning.jobs.endpoint(job_id=_named(job_id))), JOB)


def order_job(client: TokenFactory, job_id: str, order: Literal["cancel", "pause", "resume"]) -> dict[str, Any]:
    url = f"{client.v1.fine_tuning.jobs.endpoint(job_id=_named(job_id))}/{order}"
    return document(client.post(url), JOB)


def list_checkpoints(client: TokenFactory, job_id: str) -> list[dict[str, Any]]:
    url = f"{client.v1.fine_tuning.jobs.endpoint(job_id=_named(job_id))}/checkpoints"
    found: list[dict[str, Any]] = page(client.get(url, params={"limit": PAGE}), CHECKPOINT)["data"]
    return found


def promote_checkpoint(client: TokenFactory, checkpoint: str, name: str | None) -> dict[str, Any]:
    job_id = checkpoint.strip().removeprefix("ftckpt-").rpartition("-")[0]
    if not job_id or not set(checkpoint.strip()).isdisjoint(OF_URLS):
        raise ConfigError(f"checkpoint {checkpoint!r}: an id that upweight jobs checkpoints shows is needed")
    url = f"{client.v1.fine_tuning.jobs.endpoint(job_id=job_id)}/checkpoints/{checkpoint.strip()}/promote"
    body = {} if name is None else {"name": name}
    return document(client.post(url, json=body, timeout=PROMOTE_SECONDS), MODEL)


def get_progress(client: TokenFactory, job_id: str, *, since: int = -1) -> dict[str, Any]:
    """How the job stands, with its versions above `since`."""
    url = f"{client.v1alpha1.fine_tuning.jobs.endpoint(job_id=_named(job_id))}/progress"
    return document(client.get(url, params={"since": since}), PROGRESS)


def list_jobs(client: TokenFactory, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """The newest `limit` jobs, newest first, and whether there are more."""
    found: list[dict[str, Any]] = []
    has_more = True
    while has_more and len(found) < limit:
        query = {"limit": min(PAGE, limit - len(found))} | ({"after": found[-1]["id"]} if found else {})
        told = page(client.get(client.v1.fine_tuning.jobs.bare_endpoint(), params=query), JOB)
        found += told["data"]
        has_more = bool(told["has_more"] and told["data"])
    return found, has_more


def _named(job_id: str) -> str:
    if not job_id.strip():
        raise ConfigError("the id of a job is empty; upweight jobs list shows the ids")
    if not set(job_id.strip()).isdisjoint(OF_URLS):  # another route would be asked
        raise ConfigError(f"{job_id!r} is no id of a job; upweight jobs list shows the ids")
    return job_id.strip()
