"""The file that a new job trains on: found, checked, and kept for the job alone.

Invariant: a job's copy is in the job's folder before the job exists, so nothing that becomes of the uploaded file reaches it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upweight.errors import ModelError
from upweight.models.config import DecoderConfig
from upweight.server.api.context import Parts
from upweight.server.file_methods import FileMethod, has_small_context, refuse_context
from upweight.server.home import sync_folder
from upweight.server.refusals import Refusal, invalid
from upweight.server.store import files

LOC = ("body", "training_file")
PURPOSE = "fine-tune"


@dataclass(frozen=True, kw_only=True)
class TrainingFile:
    """A file that was found good."""

    path: Path
    settings: dict[str, Any]  # what the job trains with
    notes: list[str]


async def take(parts: Parts, project: str, file_id: object, method: FileMethod, model_path: str) -> TrainingFile:
    """The project's file `file_id` for a job of `method` on the model. Raises Refusal 422 with what is wrong with them."""
    if not isinstance(file_id, str) or not file_id:
        raise invalid(LOC, f"training_file is missing: a {method.type} job needs the id of an uploaded file", "missing")
    try:
        file = await parts.database.read(lambda c: files.get_file(c, file_id, project))
    except Refusal as refused:
        raise invalid(LOC, f"training_file: {refused.text}", "file_not_found") from refused
    if file.purpose != PURPOSE:
        raise invalid(LOC, f"training_file: file {file.id} has purpose {file.purpose!r}, {PURPOSE!r} is needed")
    if has_small_context(method):
        await asyncio.to_thread(_check_context, method, model_path)
    path = parts.home.file(file.id)
    try:
        async with parts.checking:
            rows, notes = await asyncio.to_thread(_check, path, method.type)
    except FileNotFoundError as error:
        raise _gone(file_id) from error
    return TrainingFile(path=path, settings=method.settings(rows), notes=notes)


def keep(file: TrainingFile, copy: Path) -> None:
    """Give the job its copy: the same bytes under a second name where the disk can do that."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file.path, copy)
    except FileNotFoundError as error:
        raise _gone(file.path.name) from error
    except OSError:  # a file system without links
        shutil.copyfile(file.path, copy)
        with copy.open("rb") as written:
            os.fsync(written.fileno())
    sync_folder(copy.parent)
    sync_folder(copy.parent.parent)


def _gone(file_id: str) -> Refusal:
    return invalid(LOC, f"training_file: file {file_id} was deleted; upload it again", "file_not_found")


def _check(path: Path, kind: str) -> tuple[int, list[str]]:
    # On use, like what follows: both bring the tokenizer's library, which other jobs do not need here.
    from upweight.server.training_file import check_file

    checked = check_file(path, kind)
    return checked.rows, checked.notes


def _check_context(method: FileMethod, model_path: str) -> None:
    from upweight.weights.config import read_config
    from upweight.weights.source import resolve

    try:
        context: int | None = DecoderConfig.from_huggingface(read_config(resolve(model_path))).max_context
    except ModelError:  # told by the job's worker, which cannot load it either
        context = None
    refuse_context(method, context)
