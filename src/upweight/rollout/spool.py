"""Unsent samples on disk: one file for each group, written before the upload, deleted after the server's acknowledgement.

Invariants
1. A group is on disk as a whole or not at all.
2. A file's name tells the number of its task in the dataset (`upweight.rollout.cursor`), so that a task whose samples are here is
   not drawn again, even if the cursor was not saved any more.
3. One run at a time uses the folder of a job.
4. A disk that takes nothing more ends no run: what cannot be kept is told, and sent all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import IO
from urllib.parse import quote

from pydantic import ValidationError

from upweight.errors import RolloutError
from upweight.rollout.validation import StampedSample

logger = logging.getLogger(__name__)


def _locked(path: Path) -> IO[bytes]:
    """Raises `RolloutError` when another run holds it. Where the system has no such locks it holds nothing."""
    file = path.open("wb")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except OSError:
        file.close()
        raise RolloutError(
            f"spool_dir: {path.parent} is used by another run of this job; give each its own spool_dir"
        ) from None
    return file


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
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._directory / "lock")

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
            order, number, _ = file.stem.split("-", 2)
            self._next = max(self._next, int(order) + 1)
            try:
                samples = [StampedSample.from_json(line) for line in file.read_bytes().splitlines()]
            except (ValidationError, KeyError) as error:
                logger.warning("%s holds no samples and is left alone: %s", file, error)
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
