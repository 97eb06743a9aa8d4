"""A copy of a home folder that a server can be started on, made while another server may run on the original.

Invariants:
* The copy appears under its name only when it is whole.
* It holds each checkpoint whole or not at all. A job whose newest checkpoint was removed meanwhile goes on from an older one.
* Paths that the store keeps point into the copy.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import psutil

from upweight.errors import StoreError
from upweight.server.home import folder_bytes, write_atomically

SECRET = 0o600
FOLDERS = ("jobs", "files", "models")  # caches, logs and sockets are made anew
PATHS = (("models", "path"), ("versions", "checkpoint"), ("jobs", "weights"), ("jobs", "model_path"))


@dataclass(frozen=True)
class Backup:
    folder: Path
    jobs: int
    samples: int
    bytes: int


def back_up(home: Path, target: Path) -> Backup:
    """Copy the home folder `home` to `target`, which must not exist. Raises StoreError with one line."""
    home, target = home.absolute(), target.absolute()
    store = home / "store.sqlite3"
    if not store.exists():
        raise StoreError(f"there is no store in {home}: set UPWEIGHT_HOME or use --home; use pg_dump for PostgreSQL")
    if target.exists():
        raise StoreError(f"{target} exists already: give a folder that does not")
    if target.is_relative_to(home):
        raise StoreError(f"{target} lies in the home folder itself: give a folder outside {home}")
    _remove_unfinished(target)
    aside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        aside.mkdir(parents=True, mode=0o700)
        _copy_store(store, aside / store.name)
        for name in FOLDERS:
            if (home / name).exists():
                _copy_folder(home / name, aside / name)
        _copy_key(home / "api_key", aside / "api_key")
        jobs, samples = _point_into(aside / store.name, home, target)
        aside.replace(target)
    except (OSError, sqlite3.Error) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise StoreError(f"the backup to {target} failed: {error}") from error
    return Backup(folder=target, jobs=jobs, samples=samples, bytes=folder_bytes(target))


def _remove_unfinished(target: Path) -> None:
    """Of backups to the same place that were killed."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        if not psutil.pid_exists(int(left.name.split(".")[-2])):
            shutil.rmtree(left, ignore_errors=True)


def _copy_store(source: Path, target: Path) -> None:
    """One consistent state, by SQLite's own online backup: writers go on meanwhile."""
    if not os.access(source.parent, os.W_OK):  # SQLite cannot read its log there, and nobody can write
        for end in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{source}{end}", f"{target}{end}")
        target.chmod(SECRET)
        return
    with contextlib.closing(sqlite3.connect(source)) as reader, contextlib.closing(sqlite3.connect(target)) as writer:
        reader.backup(writer)
    target.chmod(SECRET)


def _copy_folder(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700)
    for entry in sorted(os.scandir(source), key=lambda one: one.name):
        place = target / entry.name
        if source.name == "checkpoints":
            _copy_whole_or_not(Path(entry.path), place)
        elif entry.is_dir(follow_symlinks=False):
            _copy_folder(Path(entry.path), place)
        else:
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(entry.path, place)


def _copy_whole_or_not(source: Path, target: Path) -> None:
    """A checkpoint that is removed while it is copied leaves nothing. Raises OSError when the copy cannot be written."""
    before = _listing(source)
    try:
        shutil.copytree(source, target)
    except (shutil.Error, FileNotFoundError, NotADirectoryError) as error:
        if before and before == _listing(source):  # it is all there: a full disk, say
            raise OSError(_first_reason(error)) from error
        shutil.rmtree(target, ignore_errors=True)
        return
    if not before == _listing(source) == _listing(target):
        shutil.rmtree(target, ignore_errors=True)


def _first_reason(error: OSError) -> str:
    """`shutil.Error` has a list of sources, targets and reasons."""
    listed = isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list) and error.args[0]
    return str(listed[0][2]) if listed else str(error)


def _listing(folder: Path) -> dict[str, int]:
    sizes = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                path = os.path.join(place, name)
                sizes[os.path.relpath(path, folder)] = os.lstat(path).st_size
    return sizes


def _copy_key(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        write_atomically(target, source.read_text(), mode=SECRET)


def _point_into(store: Path, home: Path, target: Path) -> tuple[int, int]:
    """Rewrite paths below `home`; the numbers of jobs and samples."""
    with contextlib.closing(sqlite3.connect(store)) as connection, connection:
        for table, column in PATHS:
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                (f"{target}/", len(f"{home}/") + 1, len(f"{home}/"), f"{home}/"),
            )
        jobs, samples = (
            connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("jobs", "samples")
        )
    return jobs, samples
