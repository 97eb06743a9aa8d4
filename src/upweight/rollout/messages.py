"""What the helper threads tell the main loop, through one queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from upweight.rollout.models import JobStatusUpdate, RolloutException, RolloutResult


@dataclass
class TasksDrawn:
    """Answer to one request to the dataset; `ended` = it gave nothing. `state`: its cursor before it was asked."""

    specs: list[Any]
    ended: bool = False
    state: Any = None


@dataclass
class DatasetFailed:
    exception: BaseException


@dataclass
class Uploaded:
    """The server stored samples; `open_samples` are in the batch being filled."""

    batches_filled: int
    open_samples: int


@dataclass
class PlacesTaken:
    """Somebody else filled places; `dropped` samples of ours became too stale or found no place."""

    n_places: int
    dropped: int


@dataclass
class JobEnded:
    """The job reached a terminal state; `error` is None when it succeeded."""

    error: Exception | None


@dataclass
class Broken:
    """A helper thread cannot go on; the run ends with this exception."""

    exception: BaseException


@dataclass
class Evaluated:
    """Means of the held-out scores, by name; empty if no task could be scored."""

    version: int
    means: dict[str, float]


@dataclass
class WakeUp:
    """Look around: a stop was requested."""


RolloutRunnerInputs = (
    JobStatusUpdate
    | RolloutResult
    | RolloutException
    | TasksDrawn
    | DatasetFailed
    | Uploaded
    | PlacesTaken
    | JobEnded
    | Broken
    | Evaluated
    | WakeUp
)
