"""Samples as they lie in the store: packed arrays, a content hash, what the trainer needs of `debug_info`."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

UNKNOWN_VERSION = -1  # of a token that no completion of the job explains
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

_FLOAT64 = struct.Struct("<d")
_SORTED = json.JSONEncoder(sort_keys=True, separators=(",", ":"))  # made once: making it takes longer than using it


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
    return join_sample(
        id=id,
        token_ids=np.asarray(token_ids, dtype="<i4").tobytes(),
        exact_logprobs=exact.tobytes(),
        logprobs=exact.astype("<f4").tobytes(),
        mask=np.asarray(mask, dtype="u1").tobytes(),
        reward=reward,
        metadata=metadata,
        debug_info=debug_info,
    )


def join_sample(
    *,
    id: str,
    token_ids: bytes,
    exact_logprobs: bytes | memoryview,
    logprobs: bytes,
    mask: bytes,
    reward: float,
    metadata: dict[str, str],
    debug_info: dict[str, Any],
) -> NewSample:
    """A sample of arrays as `NewSample` holds them. `exact_logprobs`: float64, as the client sent them."""
    raw = debug_info.get("reward")
    task = debug_info.get("task_id")
    described = _SORTED.encode([metadata, debug_info]).encode()
    parts = [token_ids, exact_logprobs, mask, _FLOAT64.pack(reward)]
    counted = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    # In one piece: each large one would give the GIL away, and wait for it again.
    content_hash = hashlib.sha256(b"".join([*counted, described])).digest()
    return NewSample(
        id=id,
        content_hash=content_hash,
        token_ids=token_ids,
        logprobs=logprobs,
        mask=mask,
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
