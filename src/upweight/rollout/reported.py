"""The versions that samples report in `debug_info`: checked in the worker for their form, beside the tracker for their truth.

`inference_version` is an int, `token_inference_versions` a list of them; None, or nothing, reports nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from upweight.rollout.exceptions import RolloutValidationError
from upweight.rollout.models import Sample, SampleGroup

ONE, EACH = "inference_version", "token_inference_versions"
REASON = "inference_version"


class Reported(NamedTuple):
    """One version: which sample of the group tells it, and in which field."""

    sample: int
    field: str
    version: int


def oldest_reported(where: str, sample: Sample) -> int | None:
    """The smallest version that a sample tells; None if it tells none.

    Raises `RolloutValidationError`, beginning with `where`, for a version that is no whole number ≥ 0.
    """
    found: list[int] = []
    for field, versions in _told(sample):
        if not isinstance(versions, list):
            raise _refused(where, field, versions, "it must be a list of versions")
        for version in versions:
            if isinstance(version, bool) or not isinstance(version, int) or version < 0:
                raise _refused(where, field, version, "a version is a whole number from 0")
        found += versions
    return min(found, default=None)


def newest_reported(group: SampleGroup) -> Reported | None:
    """The largest version that a checked group tells."""
    found = [
        Reported(index, field, max(versions))
        for index, sample in enumerate(group.samples)
        for field, versions in _told(sample)
        if versions
    ]
    return max(found, key=lambda reported: reported.version, default=None)


def too_new(task_id: str, reported: Reported, newest: int) -> RolloutValidationError:
    """The error of a group that reports a version which was never served."""
    reason = f"the newest version of this job is {newest}"
    return _refused(f"Task {task_id}, sample {reported.sample}", reported.field, reported.version, reason)


def _told(sample: Sample) -> list[tuple[str, Any]]:
    info = sample.debug_info
    if not info:
        return []
    one, each = info.get(ONE), info.get(EACH)
    told: list[tuple[str, Any]] = [] if one is None else [(ONE, [one])]
    return told if each is None else [*told, (EACH, each)]


def _refused(where: str, field: str, value: object, reason: str) -> RolloutValidationError:
    return RolloutValidationError(f"{where}: debug_info[{field!r}] holds {value!r}; {reason}", reason=REASON)
