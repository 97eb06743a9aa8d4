"""`from_checkpoint` of a request: the checkpoint of an earlier job whose weights a new job starts from.

Invariant: the new job has the checkpoint under a second name, whole, before it exists; what becomes of the earlier job's does not
reach it. Its weights are made of it when the job begins (`supervision.origin`).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row

from upweight.server.api.job_answers import checkpoint_id_of, checkpoint_version
from upweight.server.home import sync_folder
from upweight.server.refusals import Refusal, invalid
from upweight.server.store import jobs, versions
from upweight.server.store.jobs import Job
from upweight.server.supervision.specs import model_names

FIELD = ("body", "from_checkpoint")
KNOWN = ("type", "checkpoint_id", "job_id", "step")
SHAPE = '{"type": "ft", "checkpoint_id": "ftckpt-…"} or {"type": "ft", "job_id": "ftjob-…", "step": N}'


@dataclass(frozen=True, kw_only=True)
class Origin:
    job: Job
    version: int
    fingerprint: str
    checkpoint: str  # path

    @property
    def kept(self) -> dict[str, Any]:
        """What the new job's row remembers and answers show."""
        name = checkpoint_id_of(self.job.id, self.version)
        return {"type": "ft", "checkpoint_id": name, "job_id": self.job.id, "step": self.version}


def check_shape(given: object) -> None:
    """Raises Refusal 422."""
    if given is None:
        return
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or kind != "ft":
        text = "from_checkpoint of type 'hf' is not offered: nothing is downloaded; name a folder as `model`"
        raise invalid(FIELD, text if kind == "hf" else f"from_checkpoint must be {SHAPE}")
    if unknown := sorted(set(given) - set(KNOWN)):
        raise invalid((*FIELD, unknown[0]), f"from_checkpoint.{unknown[0]} is unknown; known: {', '.join(KNOWN)}")
    by_id, job_id, step = given.get("checkpoint_id"), given.get("job_id"), given.get("step")
    is_step = isinstance(step, int) and not isinstance(step, bool)
    if not (isinstance(by_id, str) if by_id is not None else isinstance(job_id, str) and is_step):
        raise invalid(FIELD, f"from_checkpoint must be {SHAPE}")


def find(connection: Connection, project: str, given: dict[str, Any], model: str) -> Origin:
    """Raises Refusal 422 when there is no such checkpoint, or `model` is not what its job was trained from."""
    name = given.get("checkpoint_id") or checkpoint_id_of(given["job_id"], given["step"])
    job_id = given.get("job_id") or name.removeprefix("ftckpt-").rpartition("-")[0]
    try:
        job = jobs.get_job(connection, job_id, project)
        row = versions.get_version(connection, job_id, checkpoint_version(job_id, name))
    except Refusal as refused:
        raise invalid(FIELD, f"from_checkpoint: {refused.text}", "checkpoint_not_found") from refused
    step = given.get("step")
    if row is None or row.checkpoint is None or step not in (None, row.version):
        raise invalid(FIELD, f"from_checkpoint: checkpoint {name} does not exist", "checkpoint_not_found")
    if model not in (names := model_names(job)):
        text = f"model = {model!r}: the checkpoint is of a job on {names[0]!r}; name that"
        raise invalid(("body", "model"), text)
    return Origin(job=job, version=row.version, fingerprint=row.fingerprint, checkpoint=row.checkpoint)


def keep(origin: Origin, folder: Path) -> None:
    """The checkpoint in `folder`, by its own name, which says that it is complete: the same bytes where the disk can link them.

    Raises Refusal 422 when it is gone.
    """
    folder.mkdir(parents=True)
    try:
        shutil.copytree(origin.checkpoint, folder / Path(origin.checkpoint).name, copy_function=_link)
    except (shutil.Error, FileNotFoundError, NotADirectoryError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise gone(origin) from error
    sync_folder(folder)
    sync_folder(folder.parent)


def still_there(connection: Connection, origin: Origin) -> bool:
    """Whether what was kept is whole: a checkpoint is forgotten before it is removed."""
    row: Row | None = versions.get_version(connection, origin.job.id, origin.version)
    return row is not None and row.checkpoint == origin.checkpoint


def gone(origin: Origin) -> Refusal:
    name = origin.kept["checkpoint_id"]
    return invalid(FIELD, f"from_checkpoint: {name} is no longer on the disk", "checkpoint_not_found")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
        with open(target, "rb") as written:
            os.fsync(written.fileno())
