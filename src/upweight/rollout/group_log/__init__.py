"""A file with one JSON line per finished group, and a way to look through it.

    python -m upweight.rollout.group_log FILE [--fate failed] [--task TASK-ID]

A line has `time` (seconds since 1970), `job_id`, `task_id`, `task` (what the dataset gave), `fate`, `version`, `retries`,
`reasons` (one for each failed attempt), `error` and `samples` as they are uploaded. The fate "accepted" also stands for groups
that wait for their batch.

The way to look through it is `__main__` of this package, since a module that `upweight.rollout` imports cannot be run as well.

Invariant: logging never ends a run; a file that cannot be written is given up with one warning.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from upweight.rollout.exceptions import in_words
from upweight.rollout.models import RolloutException, RolloutResult
from upweight.rollout.validation import StampedSample

logger = logging.getLogger(__name__)

FATES = ("accepted", "rejected", "failed", "timed_out", "dropped_stale", "surplus")


class GroupLog:
    """Appends to `path`; with None it does nothing."""

    def __init__(self, path: Path | None, job_id: str) -> None:
        self._job_id = job_id
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")

    def note(self, news: RolloutResult | RolloutException, fate: str, samples: Sequence[StampedSample] = ()) -> None:
        if self._file is None or news.task is None:
            return
        error = news.error if isinstance(news, RolloutResult) else news.exception
        facts = {
            "time": round(time.time(), 3),
            "job_id": self._job_id,
            "task_id": str(news.task.id),
            "task": news.task.spec,
            "fate": fate,
            "version": samples[0].version if samples else news.task.starting_inference_version,
            "retries": news.retries,
            "reasons": list(news.reasons),
            "error": None if error is None else in_words(error),
        }
        bodies = b",".join(sample.body for sample in samples)
        try:
            self._file.write(b'%b,"samples":[%b]}\n' % (_as_json(facts)[:-1], bodies))
            self._file.flush()
        except OSError as problem:
            logger.warning("The group log %s is given up: %s", self._file.name, problem)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as problem:
                logger.warning("The group log %s was not closed well: %s", file.name, problem)


def _as_json(facts: dict[str, Any]) -> bytes:
    try:
        return json.dumps(facts, default=_plain).encode()
    except Exception:  # noqa: BLE001 (a task with keys that are no text, that holds itself, that does what it likes when looked at)
        return json.dumps({**facts, "task": _shown(facts["task"])}).encode()


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return _shown(value)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 (whatever a foreign `__repr__` raises)
        return f"<{type(value).__name__}>"


def read_groups(path: Path) -> Iterator[dict[str, Any]]:
    """The groups of a log, also while it is being written: a last line that is cut short is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
