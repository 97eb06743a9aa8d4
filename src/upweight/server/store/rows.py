"""Samples as they lie in the store: packed arrays, a content hash, what the trainer needs of `debug_info`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

UNKNOWN_VERSION = -1  # of a token that no completion of the job explains
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class NewSample:
    """One uploaded sample, checked and packed."""

    id: str
    content_hash: bytes  # over everything the client sent, at the client's precision
    token_ids: bytes  # int32
    logprobs: bytes  # float32
    mask: bytes  # uint8
    reward: float
    metadata: dict[str, str]
    debug_info: dict[str, Any]
    task_id: str | None
    raw_reward: float | None


def pack_sample(
    *,
    id: str,
    token_ids: ArrayLike,
    logprobs: ArrayLike,
    mask: ArrayLike,
    reward: float,
    metadata: dict[str, str],
    debug_info: dict[str, Any],
) -> NewSample:
    exact = np.asarray(logprobs, dtype="<f8")
    tokens = np.asarray(token_ids, dtype="<i4")
    trained = np.asarray(mask, dtype="u1")
    raw = debug_info.get("reward")
    task = debug_info.get("task_id")
    digest = hashlib.sha256()
    for part in (tokens.tobytes(), exact.tobytes(), trained.tobytes(), np.float64(reward).tobytes()):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(json.dumps([metadata, debug_info], sort_keys=True, separators=(",", ":")).encode())
    return NewSample(
        id=id,
        content_hash=digest.digest(),
        token_ids=tokens.tobytes(),
        logprobs=exact.astype("<f4").tobytes(),
        mask=trained.tobytes(),
        reward=float(reward),
        metadata=metadata,
        debug_info=debug_info,
        task_id=str(task) if isinstance(task, str | int) else None,
        raw_reward=float(raw) if isinstance(raw, int | float) and is_finite32(raw) else None,
    )


def is_finite32(value: float) -> bool:
    """Whether `value` is a number that float32, in which everything is trained, can hold."""
    return abs(value) <= LARGEST_FLOAT32  # False for NaN too


def completion_key(prompt_ids: np.ndarray, output_ids: np.ndarray) -> bytes:
    """Hash of the exact prompt and output ids (int32 arrays) and of where one ends and the other starts."""
    digest = hashlib.sha256(len(prompt_ids).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(prompt_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(output_ids, dtype="<i4").tobytes())
    return digest.digest()
