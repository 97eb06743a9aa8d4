"""Uploaded samples: checked, then packed. Everything a client may get wrong is named with sample id and field."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from upweight.server.refusals import Refusal, problem
from upweight.server.store.rows import LARGEST_FLOAT32, NewSample, is_finite32, pack_sample

LARGEST_TOKEN = 2**31 - 1
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
    try:
        upload = Upload.model_validate_json(body)
    except ValidationError as error:
        named = _ids(error, body)
        raise Refusal(422, [_describe(item, named) for item in error.errors()[:MOST_PROBLEMS]]) from error
    problems: list[dict[str, Any]] = []
    for position, sample in enumerate(upload.samples):
        problems += [
            problem(("body", "samples", position, field), f"sample {sample.id!r}: {message}")
            for field, message in _problems(sample, needs_task)
        ]
    if problems:
        raise Refusal(422, problems[:MOST_PROBLEMS])
    return [_pack(sample) for sample in upload.samples]


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


def _problems(sample: UploadedSample, needs_task: bool) -> list[tuple[str, str]]:
    """(field, what is wrong with it) of one sample."""
    tokens, count = sample.token_ids, len(sample.token_ids)
    found: list[tuple[str, str]] = []
    if not sample.id:
        found.append(("id", "id is empty"))
    if count == 0:
        found.append(("token_ids", "token_ids is empty"))
    for field in ("logprobs", "mask"):
        length = len(getattr(sample, field))
        if length != count:
            found.append((field, f"{field} has {length} entries, token_ids has {count}; they must be equally long"))
    if count and not (min(tokens) >= 0 and max(tokens) <= LARGEST_TOKEN):
        found.append(("token_ids", f"token ids must lie in [0, {LARGEST_TOKEN}], got {min(tokens)} to {max(tokens)}"))
    if not set(sample.mask) <= {0, 1}:
        found.append(("mask", f"mask may hold 0 and 1 only, got {sorted(set(sample.mask) - {0, 1})[:5]}"))
    if len(logprobs := np.asarray(sample.logprobs, dtype=np.float64)) and not np.abs(logprobs).max() <= LARGEST_FLOAT32:
        wrong = [value for value in sample.logprobs if not is_finite32(value)]
        found.append(("logprobs", f"logprobs holds {wrong[0]}, which is not a finite number of 32 bits"))
    if not is_finite32(sample.normalized_reward):
        reward = sample.normalized_reward
        found.append(("normalized_reward", f"normalized_reward is {reward}, it must be a finite number of 32 bits"))
    if needs_task and not isinstance(sample.debug_info.get("task_id"), str | int):
        found.append(("debug_info", 'debug_info["task_id"] is missing; advantages within a group need it'))
    return found


def _pack(sample: UploadedSample) -> NewSample:
    return pack_sample(
        id=sample.id,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        mask=sample.mask,
        reward=sample.normalized_reward,
        metadata=sample.metadata,
        debug_info=sample.debug_info,
    )
