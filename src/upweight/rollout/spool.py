"""Unsent samples on disk: one file each, written before the upload, deleted after the server's acknowledgement."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from pydantic import ValidationError

from upweight.rollout.validation import StampedSample

logger = logging.getLogger(__name__)


class Spool:
    """The unsent samples of one job, in order. With `directory` None it keeps nothing."""

    def __init__(self, directory: Path | None, job_id: str) -> None:
        self._directory = None if directory is None else directory / quote(job_id, safe="")
        self._files: dict[str, Path] = {}
        self._next = 0
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def load(self) -> list[StampedSample]:
        """What an earlier run left behind."""
        if self._directory is None:
            return []
        samples = []
        for file in sorted(self._directory.glob("*.json")):
            self._next = max(self._next, int(file.stem.split("-", 1)[0]) + 1)
            try:
                sample = StampedSample.from_json(file.read_bytes())
            except (ValidationError, KeyError) as error:
                logger.warning("%s is no sample and is left alone: %s", file, error)
                continue
            self._files[sample.id] = file
            samples.append(sample)
        return samples

    def add(self, samples: Iterable[StampedSample]) -> None:
        if self._directory is None:
            return
        for sample in samples:
            file = self._directory / f"{self._next:012d}-{quote(sample.id, safe='')}.json"
            part = file.with_suffix(".part")
            part.write_bytes(sample.body)
            part.replace(file)
            self._files[sample.id] = file
            self._next += 1

    def remove(self, samples: Iterable[StampedSample]) -> None:
        for sample in samples:
            file = self._files.pop(sample.id, None)
            if file is not None:
                file.unlink(missing_ok=True)
