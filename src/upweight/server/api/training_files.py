"""The file that a new job trains on: found, checked, and kept for the job alone.

Invariant: a job's copy is in the job's folder before the job exists, so nothing that becomes of the uploaded file reaches it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
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

TRAINING, VALIDATION = "training_file", "validation_file"  # fields of a request
PURPOSE = "fine-tune"


@dataclass(frozen=True, kw_only=True)
class TrainingFile:
    """What a job trains on, and what it is validated with if anything; found good."""

    paths: dict[str, Path]  # name in the job's folder → uploaded file
    settings: dict[str, Any]  # what the job trains with
    notes: list[str]


async def take(
    parts: Parts, project: str, kept: Mapping[str, Any], method: FileMethod, model_path: str
) -> TrainingFile:
    """The project's files that a request names, for a job of `method` on the model. Raises Refusal 422 with what is wrong."""
    if not kept["training_file"]:
        text = f"training_file is missing: a {method.type} job needs the id of an uploaded file"
        raise invalid(("body", TRAINING), text, "missing")
    if has_small_context(method):
        await asyncio.to_thread(_check_context, method, model_path)
    path, rows, notes = await _found(parts, project, kept[TRAINING], method.type, TRAINING)
    paths, settings = {parts.home.TRAINING_FILE: path}, method.settings(rows)
    if kept.get(VALIDATION):
        path, rows, more = await _found(parts, project, kept[VALIDATION], method.type, VALIDATION)
        paths[parts.home.VALIDATION_FILE] = path
        settings, notes = {**settings, "validation_rows": rows}, notes + more
    return TrainingFile(paths=paths, settings=settings, notes=notes)


async def _found(parts: Parts, project: str, file_id: str, kind: str, name: str) -> tuple[Path, int, list[str]]:
    """Path, number of rows and notes of a good file."""
    try:
        file = await parts.database.read(lambda c: files.get_file(c, file_id, project))
    except Refusal as refused:
        raise invalid(("body", name), f"{name}: {refused.text}", "file_not_found") from refused
    if file.purpose != PURPOSE:
        raise invalid(("body", name), f"{name}: file {file.id} has purpose {file.purpose!r}, {PURPOSE!r} is needed")
    path = parts.home.file(file.id)
    try:
        async with parts.checking:
            rows, notes = await asyncio.to_thread(_check, path, kind, name)
    except FileNotFoundError as error:
        raise _gone(file_id, name) from error
    return path, rows, notes


def keep(file: TrainingFile, folder: Path) -> None:
    """Give the job its copies: the same bytes under a second name where the disk can do that."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in file.paths.items():
        try:
            os.link(path, folder / name)
        except FileNotFoundError as error:
            raise _gone(path.name, TRAINING) from error
        except OSError:  # a file system without links
            shutil.copyfile(path, folder / name)
            with (folder / name).open("rb") as written:
                os.fsync(written.fileno())
    sync_folder(folder)
    sync_folder(folder.parent)


def _gone(file_id: str, name: str) -> Refusal:
    return invalid(("body", name), f"{name}: file {file_id} was deleted; upload it again", "file_not_found")


def _check(path: Path, kind: str, name: str) -> tuple[int, list[str]]:
    # On use, like what follows: both bring the tokenizer's library, which other jobs do not need here.
    from upweight.server.training_file import check_file

    checked = check_file(path, kind, name=name)
    return checked.rows, checked.notes


def _check_context(method: FileMethod, model_path: str) -> None:
    from upweight.weights.config import read_config
    from upweight.weights.source import resolve

    try:
        context: int | None = DecoderConfig.from_huggingface(read_config(resolve(model_path))).max_context
    except ModelError:  # told by the job's worker, which cannot load it either
        context = None
    refuse_context(method, context)
