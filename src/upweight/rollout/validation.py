"""Checks what a rollout returned, inside the worker, so that retries apply; and turns it into wire samples.

Numbers may be of any type that converts exactly (`__index__`, `__float__`): arrays' scalars are fine. Lists are converted by
`array` and `bytes`, which do that in C; only a sample with a fault is looked at number by number, to name it.
"""

from __future__ import annotations

import json
import math
import operator
from array import array
from collections.abc import Sequence
from typing import Any

from upweight.api_client.models.rl_job import Sample as WireSample
from upweight.rollout.exceptions import RolloutValidationError
from upweight.rollout.models import Sample, SampleGroup

LARGEST_ID = 2**32 - 1


def check_group(task_id: str, group: object, expected_size: int) -> None:
    """Raises `RolloutValidationError` unless `group` is rejected or holds `expected_size` valid samples."""
    if not isinstance(group, SampleGroup):
        raise RolloutValidationError(
            f"Task {task_id}: expected a SampleGroup, got {type(group).__name__}", reason="wrong_type"
        )
    if group.is_rejected:
        return
    if len(group.samples) != expected_size:
        raise RolloutValidationError(
            f"Task {task_id}: expected {expected_size} samples in the group, got {len(group.samples)}",
            reason="wrong_size",
        )
    for index, sample in enumerate(group.samples):
        _check_sample(f"Task {task_id}, sample {index}", sample)


def _check_sample(where: str, sample: object) -> None:
    if not isinstance(sample, Sample):
        raise RolloutValidationError(f"{where}: expected a Sample, got {type(sample).__name__}", reason="wrong_type")
    lengths = {name: len(getattr(sample, name)) for name in ("token_ids", "logprobs", "mask")}
    if len(set(lengths.values())) != 1:
        raise RolloutValidationError(f"{where}: lengths differ: {lengths}", reason="lengths")
    if not len(sample.token_ids):
        raise RolloutValidationError(f"{where}: token_ids is empty", reason="empty")
    if not _is_clean(sample):
        _name_fault(where, sample)
    if 1 not in sample.mask:
        raise RolloutValidationError(f"{where}: no trainable token (the mask is all 0)", reason="no trainable token")
    _check_extras(where, sample)


def _is_clean(sample: Sample) -> bool:
    """Whether ids are integers from 0, the mask holds 0 and 1 only and all numbers are finite; False = look closer."""
    try:
        array("I", list(sample.token_ids))
        mask = bytes(list(sample.mask))
        total = sum(array("d", [*sample.logprobs, sample.normalized_reward]))
    except (TypeError, ValueError, OverflowError):
        return False
    return mask.count(0) + mask.count(1) == len(mask) and math.isfinite(total)


def _real(value: Any) -> float:
    """Unlike `float`, this refuses text."""
    return array("d", [value])[0]


def _name_fault(where: str, sample: Sample) -> None:
    tokens = _converted(where, "token_ids", sample.token_ids, operator.index)
    if min(tokens) < 0:
        raise RolloutValidationError(f"{where}: token_ids holds a negative id, {min(tokens)}", reason="negative_id")
    if max(tokens) > LARGEST_ID:
        raise RolloutValidationError(f"{where}: token_ids holds {max(tokens)}, which is no token id", reason="large_id")
    mask = _converted(where, "mask", sample.mask, operator.index)
    if not set(mask) <= {0, 1}:
        raise RolloutValidationError(
            f"{where}: mask holds {set(mask) - {0, 1}}; only 0 and 1 are allowed", reason="mask"
        )
    for name, values in (("logprobs", sample.logprobs), ("normalized_reward", [sample.normalized_reward])):
        if not all(map(math.isfinite, _converted(where, name, values, _real))):
            raise RolloutValidationError(f"{where}: {name} is not finite", reason="non_finite")


def _converted(where: str, field: str, values: Sequence[Any], convert: Any) -> list[Any]:
    try:
        return list(map(convert, values))
    except (TypeError, ValueError) as error:
        raise RolloutValidationError(f"{where}: {field}: {error}", reason="wrong_type") from error


def _check_extras(where: str, sample: Sample) -> None:
    for key, value in (sample.metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise RolloutValidationError(
                f"{where}: metadata[{key!r}] is {type(value).__name__}; keys and values must be text", reason="metadata"
            )
    if not isinstance(sample.debug_info, dict | None):
        raise RolloutValidationError(f"{where}: debug_info must be a dict", reason="debug_info")
    for key, value in (sample.debug_info or {}).items():
        try:
            json.dumps({key: value}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RolloutValidationError(f"{where}: debug_info[{key!r}]: {error}", reason="debug_info") from error


def reported_version(samples: Sequence[Sample]) -> int | None:
    """The smallest version that the samples' `debug_info` reports; None if it reports none."""
    found: list[int] = []
    for sample in samples:
        info = sample.debug_info or {}
        candidates = [info.get("inference_version"), *_as_list(info.get("token_inference_versions"))]
        found += [version for version in candidates if isinstance(version, int)]
    return min(found, default=None)


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def to_wire(sample: Sample, *, task_id: str, version: int) -> WireSample:
    """A checked sample as it is uploaded, stamped with its task and version."""
    return WireSample.model_construct(  # all of it was checked; checking again takes as long as all the rest
        id=str(sample.id),
        token_ids=array("I", list(sample.token_ids)).tolist(),
        logprobs=array("d", list(sample.logprobs)).tolist(),
        mask=list(bytes(list(sample.mask))),
        normalized_reward=float(sample.normalized_reward),
        metadata=dict(sample.metadata or {}),
        debug_info={**(sample.debug_info or {}), "starting_inference_version": version, "task_id": str(task_id)},
    )
