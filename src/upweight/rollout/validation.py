"""Checks what a rollout returned, inside the worker, so that retries apply; and encodes it there, once.

Invariants
1. What was encoded can be uploaded: ids, mask and numbers are in the ranges that servers store (31 and 32 bits), nothing is nested
   deeper than JSON readers allow, and the bytes are valid UTF-8 JSON.
2. The bytes of a sample are made once: uploads, their repetitions, the spool and the log of groups carry the same ones.

Numbers may be of any type that converts exactly (`__index__`, `__float__`): arrays' scalars are fine. Lists are converted by
`array` and `bytes`, which do that in C; only a sample with a fault is looked at number by number, to name it.
"""

from __future__ import annotations

import json
import math
import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from upweight.api_client.models.rl_job import Sample as WireSample
from upweight.rollout.exceptions import RolloutValidationError
from upweight.rollout.models import Sample, SampleGroup
from upweight.rollout.reported import oldest_reported

LARGEST_ID = 2**31 - 1
DEEPEST = 100  # levels of an item of debug_info
_to_json = TypeAdapter(Any).dump_json
_debug_json = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
_DIGITS = b"01".ljust(256)
_STAMPS = ("starting_inference_version", "task_id")


class StampedSample(NamedTuple):
    """A sample as it is uploaded: `body` is its JSON object, in which `task_id` and `version` stand too."""

    id: str
    task_id: str
    version: int
    body: bytes
    n_tokens: int

    @classmethod
    def from_json(cls, body: bytes) -> StampedSample:
        """Raises `pydantic.ValidationError` or `KeyError` for what no run has written."""
        sample = WireSample.model_validate_json(body)
        info = sample.debug_info
        return cls(
            sample.id, str(info["task_id"]), int(info["starting_inference_version"]), body, len(sample.token_ids)
        )

    def to_wire(self) -> WireSample:
        return WireSample.model_validate_json(self.body)


class EncodedSample(NamedTuple):
    """A checked sample. `fields` is the inside of its JSON object but for the id and what ends `debug_info`.

    `reported` is the version that it tells, None if it tells none.
    """

    id: str
    fields: bytes
    reported: int | None
    n_tokens: int

    def stamp(self, task_id: str, version: int) -> StampedSample:
        parts = _to_json(self.id), self.fields, version, _to_json(task_id)
        body = b'{"id":%b,%b"starting_inference_version":%d,"task_id":%b}}' % parts
        return StampedSample(self.id, task_id, version, body, self.n_tokens)


def encode_group(task_id: str, group: object, expected_size: int) -> list[EncodedSample]:
    """The samples of a group, none of a rejected one.

    Raises:
        RolloutValidationError: unless `group` is rejected or holds `expected_size` valid samples.
    """
    if not isinstance(group, SampleGroup):
        raise RolloutValidationError(
            f"Task {task_id}: expected a SampleGroup, got {type(group).__name__}", reason="wrong_type"
        )
    if group.is_rejected:
        return []
    size = _length(f"Task {task_id}", "samples", group.samples)
    if size != expected_size:
        raise RolloutValidationError(
            f"Task {task_id}: expected {expected_size} samples in the group, got {size}", reason="wrong_size"
        )
    return [_encode(f"Task {task_id}, sample {index}", sample) for index, sample in enumerate(group.samples)]


def _encode(where: str, sample: object) -> EncodedSample:
    if not isinstance(sample, Sample):
        raise RolloutValidationError(f"{where}: expected a Sample, got {type(sample).__name__}", reason="wrong_type")
    each = {name: _length(where, name, getattr(sample, name)) for name in ("token_ids", "logprobs", "mask")}
    lengths = set(each.values())
    if len(lengths) != 1:
        raise RolloutValidationError(f"{where}: lengths differ: {each}", reason="lengths")
    if lengths == {0}:
        raise RolloutValidationError(f"{where}: token_ids is empty", reason="empty")
    try:
        token_ids = array("i", _listed(sample.token_ids)).tolist()
        mask = bytes(_listed(sample.mask))
        logprobs = array("d", _listed(sample.logprobs)).tolist()
        reward = _real(sample.normalized_reward)
    except (TypeError, ValueError, OverflowError):
        _name_fault(where, sample)
        raise
    n_trained = mask.count(1)
    in_32_bits = sum(array("f", logprobs)) + array("f", [reward])[0]
    if mask.count(0) + n_trained != len(mask) or not math.isfinite(in_32_bits) or min(token_ids) < 0:
        _name_fault(where, sample)  # finds none if only the sum was too large
    if not n_trained:
        raise RolloutValidationError(f"{where}: no trainable token (the mask is all 0)", reason="no trainable token")
    plain = {
        "object": "fine_tuning.rl_sample",
        "token_ids": token_ids,
        "logprobs": logprobs,
        "normalized_reward": reward,
        "metadata": _checked_metadata(where, sample),
    }
    parts = _to_json(plain)[1:-1], _digits(mask), _checked_debug_info(where, sample)
    fields = b'%b,"mask":[%b],"debug_info":{%b' % parts
    return EncodedSample(_checked_id(where, sample), fields, oldest_reported(where, sample), len(token_ids))


def _length(where: str, field: str, values: Any) -> int:
    if type(values) is list:
        return len(values)
    if isinstance(values, str | Set | Mapping):
        raise RolloutValidationError(f"{where}: {field} is a {type(values).__name__}; give a list", reason="wrong_type")
    try:
        return len(values)
    except TypeError:
        shown = "None" if values is None else f"of type {type(values).__name__}"
        raise RolloutValidationError(
            f"{where}: {field} is {shown}, which has no length; give a list", reason="wrong_type"
        ) from None


def _digits(mask: bytes) -> bytes:
    """A mask of 0 and 1 as the inside of a JSON list."""
    text = bytearray(b",") * (2 * len(mask) - 1)
    text[::2] = mask.translate(_DIGITS)
    return bytes(text)


def _listed(values: Sequence[Any]) -> list[Any]:
    return values if type(values) is list else list(values)


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
        numbers = _converted(where, name, values, _real)
        if wrong := [number for number in numbers if not math.isfinite(array("f", [number])[0])]:
            raise RolloutValidationError(f"{where}: {name} is not finite in 32 bits: {wrong[0]}", reason="non_finite")


def _converted(where: str, field: str, values: Sequence[Any], convert: Any) -> list[Any]:
    try:
        return list(map(convert, values))
    except (TypeError, ValueError, OverflowError) as error:
        raise RolloutValidationError(f"{where}: {field}: {error}", reason="wrong_type") from error


def _checked_id(where: str, sample: Sample) -> str:
    if not isinstance(sample.id, str) or not sample.id or not _is_unicode(sample.id):
        raise RolloutValidationError(f"{where}: id {sample.id!r} must be a text", reason="id")
    return str(sample.id)


def _checked_metadata(where: str, sample: Sample) -> dict[str, str]:
    metadata = {} if sample.metadata is None else sample.metadata
    if not isinstance(metadata, dict):
        raise RolloutValidationError(f"{where}: metadata must be a dict", reason="metadata")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise RolloutValidationError(
                f"{where}: metadata[{key!r}] is {type(value).__name__}; keys and values must be text", reason="metadata"
            )
        if not _is_unicode(key + value):
            raise RolloutValidationError(f"{where}: metadata[{key!r}] is no valid Unicode", reason="metadata")
    return metadata


def _is_unicode(text: str) -> bool:
    """Half of a surrogate pair, as broken decoding leaves it, cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_debug_info(where: str, sample: Sample) -> bytes:
    """The items as JSON, each with a comma behind it; the stamps of the run take the place of items of that name."""
    info = {} if sample.debug_info is None else sample.debug_info
    if not isinstance(info, dict):
        raise RolloutValidationError(f"{where}: debug_info must be a dict", reason="debug_info")
    if any(name in info for name in _STAMPS):
        info = {key: value for key, value in info.items() if key not in _STAMPS}
    if not info:
        return b""
    try:
        text = _debug_json(info)
        if text.count("[") + text.count("{") > DEEPEST:
            for key, value in info.items():
                _check_depth(where, key, value)
        return text[1:-1].encode() + b","
    except (TypeError, ValueError, RecursionError):
        for key, value in info.items():
            _check_item(where, key, value)
        raise


def _check_depth(where: str, key: object, value: object) -> None:
    level, depth = [value], 0
    while level := [item for one in level for item in _inside(one)]:
        depth += 1
        if depth >= DEEPEST:
            raise RolloutValidationError(
                f"{where}: debug_info[{key!r}] is nested deeper than {DEEPEST} levels", reason="debug_info"
            )


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _check_item(where: str, key: object, value: object) -> None:
    try:
        _debug_json({key: value}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RolloutValidationError(f"{where}: debug_info[{key!r}]: {error}", reason="debug_info") from error
