"""Unsent samples on disk: one file for each group, written before the upload, deleted after the server's acknowledgement.

Invariants
1. A group is on disk as a whole or not at all.
2. A file's name tells the number of its task in the dataset (`upweight.rollout.cursor`), so that a task whose samples are here is
   not drawn again, even if the cursor was not saved any more.
3. One run at a time uses the folder of a job.
4. A disk that takes nothing more ends no run: what cannot be kept is told, and sent all the same.
5. What is not ours, or cannot be read, is told and left alone; what the server refuses is put aside as `FILE.refused`. Neither
   is sent, and neither is ever deleted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import IO
from urllib.parse import quote

from upweight.errors import RolloutError
from upweight.rollout.exceptions import in_words
from upweight.rollout.validation import StampedSample

logger = logging.getLogger(__name__)


_NAME = re.compile(r"(\d{12,})-(\d+|x)-.+")


def _locked(path: Path) -> IO[bytes]:
    """Raises `RolloutError` when another run holds it. Where the system has no such locks it holds nothing."""
    file = path.open("wb")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except BlockingIOError:
        file.close()
        raise RolloutError(
            f"spool_dir: {path.parent} is used by another run of this job; give each its own spool_dir"
        ) from None
    except OSError as error:  # some file systems of networks have no locks
        logger.warning("%s cannot be locked (%s): see to it that no other run of this job uses it", path.parent, error)
    return file


def _read(file: Path) -> list[StampedSample]:
    """Raises `ValueError`, `KeyError`, `TypeError` or `OSError` for what no run has written."""
    samples = [StampedSample.from_json(line) for line in file.read_bytes().splitlines()]
    if not samples:
        raise ValueError("it is empty")
    return samples


class Spool:
    """The unsent samples of one job, in order. With `directory` None it keeps nothing."""

    def __init__(self, directory: Path | None, job_id: str) -> None:
        self._directory = None if directory is None else directory / quote(job_id, safe="")
        self._files: dict[str, Path] = {}  # of samples, by id
        self._unsent: dict[Path, int] = {}  # samples in a file that are not acknowledged
        self._next = 0
        self.task_numbers: set[int] = set()
        self._lock: IO[bytes] | None = None
        self._is_told = False
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._lock = _locked(self._directory / "lock")
            except OSError as error:
                raise RolloutError(f"spool_dir: {self._directory} cannot be used: {error}") from error

    def close(self) -> None:
        """Let another run use the folder."""
        if self._lock is not None:
            self._lock.close()

    def load(self) -> list[StampedSample]:
        """What an earlier run left behind."""
        if self._directory is None:
            return []
        loaded = []
        for file in sorted(self._directory.glob("*.jsonl")):
            name = _NAME.fullmatch(file.stem)
            if name is None:
                logger.warning("%s is no file of this spool; it is left alone", file)
                continue
            order, number = name.groups()
            self._next = max(self._next, int(order) + 1)
            try:
                samples = _read(file)
            except (ValueError, KeyError, TypeError, OSError) as error:
                reason = in_words(error).splitlines()[0]
                logger.warning("%s holds no samples of a run and is left alone (%s)", file, reason)
                continue
            if number.isdecimal():
                self.task_numbers.add(int(number))
            self._remember(file, samples)
            loaded += samples
        return loaded

    def add(self, samples: Iterable[StampedSample], numbers: Mapping[str, int]) -> None:
        """Keep samples, those of one task next to each other; `numbers` in the dataset by task id."""
        if self._directory is None:
            return
        for task_id, group in groupby(samples, key=lambda sample: sample.task_id):
            members = list(group)
            try:
                self._write(members, numbers.get(task_id))
            except OSError as error:
                if not self._is_told:
                    self._is_told = True
                    logger.warning("Samples cannot be kept on disk and would die with this process: %s", error)

    def _write(self, members: list[StampedSample], number: int | None) -> None:
        if self._directory is not None:
            task_id = members[0].task_id
            file = (
                self._directory
                / f"{self._next:012d}-{'x' if number is None else number}-{quote(task_id, safe='')}.jsonl"
            )
            part = file.with_suffix(".part")
            part.write_bytes(b"".join(sample.body + b"\n" for sample in members))
            part.replace(file)
            self._remember(file, members)
            self._next += 1

    def _remember(self, file: Path, samples: list[StampedSample]) -> None:
        self._files.update((sample.id, file) for sample in samples)
        self._unsent[file] = len(samples)

    def file_of(self, sample: StampedSample) -> Path | None:
        """Where it is kept; those of one group are kept together."""
        return self._files.get(sample.id)

    def set_aside(self, file: Path) -> Path:
        """Rename a file whose samples the server refuses, so that no later run sends them; returns where it is."""
        aside = file.with_name(f"{file.name}.refused")
        self._files = {sample_id: path for sample_id, path in self._files.items() if path != file}
        self._unsent.pop(file, None)
        try:
            file.replace(aside)
        except OSError as error:
            logger.warning("%s cannot be renamed: %s", file, error)
            return file
        return aside

    def remove(self, samples: Iterable[StampedSample]) -> None:
        """These are done with; a file goes when all of its samples are."""
        for sample in samples:
            file = self._files.pop(sample.id, None)
            if file is None:
                continue
            self._unsent[file] -= 1
            if not self._unsent[file]:
                del self._unsent[file]
                file.unlink(missing_ok=True)
