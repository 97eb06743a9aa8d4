"""Uploads as nearly all of them are: numbers go from the text into arrays, without a Python object each.

Invariant: what is read here is what the models of `uploads` read. Whatever is unusual, let alone wrong, is left to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from upweight.server.store.rows import LARGEST_FLOAT32, NewSample, is_finite32, join_sample

try:
    import simdjson
except ModuleNotFoundError:  # it is compiled, and not for every system and Python
    simdjson = None  # type: ignore[assignment]

LARGEST_TOKEN = 2**31 - 1
LONGEST_ID = 256  # characters
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ARRAYS = ("token_ids", "logprobs", "mask")
# simdjson names faults by many types; all of them mean that the upload is not as nearly all are.
_UNUSUAL = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError)


def read_quickly(body: bytes, needs_task: bool) -> list[NewSample] | None:
    """The samples of an upload without faults; None if it has any, or is unusual. `needs_task`: each names its group."""
    if simdjson is None or body.startswith(BYTE_ORDER_MARK):  # which simdjson would pass over
        return None
    try:
        document = _parsed(body)
        found = document["samples"]
        if not isinstance(found, simdjson.Array):
            return None
        samples: list[Any] = list(found)
        _check_keys(document)
        numbers = {name: [sample[name] for sample in samples] for name in _ARRAYS}
        # A buffer is flat, however deep its numbers lie: with one bracket for each array, none holds another one.
        if body.count(b"[") != 1 + 3 * len(samples):
            _check_flat(*numbers.values())
        return _packed(samples, needs_task, **numbers)
    except _UNUSUAL:
        return None


def _parsed(body: bytes) -> Any:
    return simdjson.Parser().parse(body)


def _check_keys(record: Any) -> None:
    """Raises ValueError when a key stands twice: which of them counts differs from reader to reader."""
    if len(set(record)) != len(record):
        raise ValueError("a key stands twice")


def _check_flat(*numbers: list[Any]) -> None:
    for arrays in numbers:
        for array in arrays:
            if array.mini.count(b"[") != 1:
                raise ValueError("an array in an array")


def _packed(
    samples: list[Any], needs_task: bool, *, token_ids: list[Any], logprobs: list[Any], mask: list[Any]
) -> list[NewSample]:
    """All numbers of one kind are checked and converted at once. Raises ValueError for any that is wrong."""
    lengths = [len(array) for array in token_ids]
    if 0 in lengths or lengths != [len(array) for array in logprobs] or lengths != [len(array) for array in mask]:
        raise ValueError("lengths")
    tokens = _joined(token_ids, "i")
    trained = _joined(mask, "i")
    exact = _joined(logprobs, "d")
    if {len(tokens), len(trained), len(exact)} != {sum(lengths)}:  # simdjson does not count beyond 16 million
        raise ValueError("lengths")
    if len(tokens) and (tokens.min() < 0 or tokens.max() > LARGEST_TOKEN or (trained >> 1).any()):
        raise ValueError("token ids or mask")
    if len(exact) and not np.abs(exact).max() <= LARGEST_FLOAT32:
        raise ValueError("log-probs")
    of_tokens = memoryview(tokens.astype("<i4").tobytes())
    of_logprobs = memoryview(exact.astype("<f4").tobytes())
    of_exact = memoryview(exact.tobytes())
    of_mask = memoryview(trained.astype("u1").tobytes())
    made, start = [], 0
    for sample, length in zip(samples, lengths, strict=True):
        end = start + length
        rest = _rest(sample, needs_task)
        made.append(
            join_sample(
                token_ids=bytes(of_tokens[4 * start : 4 * end]),
                exact_logprobs=of_exact[8 * start : 8 * end],
                logprobs=bytes(of_logprobs[4 * start : 4 * end]),
                mask=bytes(of_mask[start:end]),
                **rest,
            )
        )
        start = end
    return made


def _joined(arrays: list[Any], kind: str) -> np.ndarray:
    """Numbers of all `arrays`, int64 (`i`) or float64 (`d`)."""
    return np.frombuffer(
        b"".join(array.as_buffer(of_type=kind) for array in arrays), dtype=f"<{kind}8".replace("d", "f")
    )


def _rest(sample: Any, needs_task: bool) -> dict[str, Any]:
    """What is no array in `sample`. Raises ValueError when it is not as it should be."""
    _check_keys(sample)
    id, reward = sample["id"], sample["normalized_reward"]
    metadata, debug_info = sample["metadata"].as_dict(), sample["debug_info"].as_dict()
    is_right = (
        isinstance(id, str)
        and 0 < len(id) <= LONGEST_ID
        and isinstance(reward, int | float)
        and not isinstance(reward, bool)
        and is_finite32(reward)
        and all(isinstance(value, str) for value in metadata.values())
        and (not needs_task or isinstance(debug_info.get("task_id"), str | int))
    )
    if not is_right:
        raise ValueError("id, reward, metadata or debug_info")
    return {"id": id, "reward": reward, "metadata": metadata, "debug_info": debug_info}
