"""Uploaded samples: checked, then packed. Everything a client may get wrong is named with sample id and field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from upweight.server.api.quick_uploads import LARGEST_TOKEN, LONGEST_ID, read_quickly
from upweight.server.refusals import Refusal, problem
from upweight.server.store.rows import LARGEST_FLOAT32, NewSample, is_finite32, pack_sample

MOST_PROBLEMS = 20  # an answer lists the first ones


class UploadedSample(BaseModel):
    """A sample as on the wire; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)

    id: str
    token_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    normalized_reward: float
    metadata: dict[str, str]
    debug_info: dict[str, Any]


class Upload(BaseModel):
    samples: list[UploadedSample]


def parse_upload(body: bytes, needs_task: bool) -> list[NewSample]:
    """Samples of an upload's body. `needs_task`: each must name its group. Raises Refusal 422."""
    quickly = read_quickly(body, needs_task)
    return read_patiently(body, needs_task) if quickly is None else quickly


def read_patiently(body: bytes, needs_task: bool) -> list[NewSample]:
    """All faults are found, and where they are."""
    samples = _models(body)
    problems: list[dict[str, Any]] = []
    packed = []
    for position, sample in enumerate(samples):
        arrays = _Arrays(sample)
        found = [*arrays.problems(), *_problems(sample, needs_task)]
        problems += [
            problem(("body", "samples", position, field), f"sample {sample.id!r}: {message}")
            for field, message in found
        ]
        if not problems:
            packed.append(_pack(sample, arrays))
    if problems:
        raise Refusal(422, problems[:MOST_PROBLEMS])
    return packed


def _models(body: bytes) -> list[UploadedSample]:
    try:
        return Upload.model_validate_json(body).samples
    except ValidationError as error:
        named = _ids(error, body)
        raise Refusal(422, [_describe(item, named) for item in error.errors()[:MOST_PROBLEMS]]) from error


class _Arrays:
    """The numbers of a sample, one entry per token; None where a number is too large for any."""

    def __init__(self, sample: UploadedSample) -> None:
        self._sample = sample
        self.tokens = _integers(sample.token_ids)
        self.mask = _integers(sample.mask)
        self.logprobs = np.array(sample.logprobs, dtype="<f8")

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it)."""
        sample, count = self._sample, len(self._sample.token_ids)
        if count == 0:
            yield "token_ids", "token_ids is empty"
        for field in ("logprobs", "mask"):
            length = len(getattr(sample, field))
            if length != count:
                yield field, f"{field} has {length} entries, token_ids has {count}; they must be equally long"
        if count and (self.tokens is None or self.tokens.min() < 0 or self.tokens.max() > LARGEST_TOKEN):
            least, most = min(sample.token_ids), max(sample.token_ids)
            yield "token_ids", f"token ids must lie in [0, {LARGEST_TOKEN}], got {least} to {most}"
        if self.mask is None or (self.mask >> 1).any():
            yield "mask", f"mask may hold 0 and 1 only, got {sorted(set(sample.mask) - {0, 1})[:5]}"
        if len(self.logprobs) and not np.abs(self.logprobs).max() <= LARGEST_FLOAT32:
            wrong = next(value for value in sample.logprobs if not is_finite32(value))
            yield "logprobs", f"logprobs holds {wrong}, which is not a finite number of 32 bits"


def _integers(numbers: list[int]) -> np.ndarray | None:
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError:
        return None


def _ids(error: ValidationError, body: bytes) -> list[Any]:
    """The ids of the samples, as far as the body can be read, so that an answer can name them."""
    if all(len(item["loc"]) < 2 for item in error.errors()):
        return []
    return [one.get("id") if isinstance(one, dict) else None for one in json.loads(body)["samples"]]


def _describe(item: Any, ids: list[Any]) -> dict[str, Any]:
    loc = ("body", *item["loc"])
    given = item.get("input")
    shown = (
        f" (got {given!r})" if isinstance(given, str | int | float | bool | None) and item["type"] != "missing" else ""
    )
    where, path = "", loc[1:]
    if len(path) > 2 and isinstance(path[1], int) and path[1] < len(ids):
        where, path = f"sample {ids[path[1]]!r}: ", path[2:]
    return problem(loc, f"{where}{'.'.join(str(part) for part in path) or 'body'}: {item['msg']}{shown}", item["type"])


def _problems(sample: UploadedSample, needs_task: bool) -> Iterator[tuple[str, str]]:
    if not sample.id:
        yield "id", "id is empty"
    if len(sample.id) > LONGEST_ID:
        yield "id", f"id has {len(sample.id)} characters, at most {LONGEST_ID} are allowed"
    if not is_finite32(sample.normalized_reward):
        reward = sample.normalized_reward
        yield "normalized_reward", f"normalized_reward is {reward}, it must be a finite number of 32 bits"
    if needs_task and not isinstance(sample.debug_info.get("task_id"), str | int):
        yield "debug_info", 'debug_info["task_id"] is missing; advantages within a group need it'


def _pack(sample: UploadedSample, arrays: _Arrays) -> NewSample:
    assert arrays.tokens is not None
    assert arrays.mask is not None
    return pack_sample(
        id=sample.id,
        token_ids=arrays.tokens,
        logprobs=arrays.logprobs,
        mask=arrays.mask,
        reward=sample.normalized_reward,
        metadata=sample.metadata,
        debug_info=sample.debug_info,
    )
