"""The interface that scores responses, and the conversion of what it returns."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any

import numpy as np

from upweight.online.data import RawRollout


class BaseRewardModel(ABC):
    """Scores responses: a rule, a loaded model or a remote service. `async def score` works as well.

    A `score` that declares any of the keyword parameters `metadata` (list of B dicts), `token_ids` (B × G lists) and
    `finish_reasons` (B × G) is given them. Responses that could not be produced are empty strings; what they get does not count.
    """

    @abstractmethod
    def score(self, prompts: list[str], responses: list[list[str]]) -> Any:
        """Rewards [B,G], anything array-like."""


def score_rollout(model: BaseRewardModel, raw: RawRollout) -> np.ndarray:
    """float32 [B,G], 0 where there is no response; `ValueError` naming the shape or the first entry that is not finite."""
    outcome = model.score(raw.prompt_texts, raw.response_texts, **_wanted(model, raw))
    if inspect.isawaitable(outcome):
        outcome = _wait_for(outcome)
    expected = raw.responses.shape[:2]
    rewards = _as_floats(outcome, expected)
    if rewards.shape != expected:
        raise ValueError(f"score returned shape {rewards.shape}; expected [B, G] = {expected}")
    valid = np.asarray(raw.response_mask).any(axis=-1)
    bad = np.argwhere(~np.isfinite(rewards) & valid)
    if len(bad):
        b, g = bad[0].tolist()
        raise ValueError(f"score returned {rewards[b, g]} for prompt {b}, response {g}; rewards must be finite")
    return np.where(valid, rewards, 0.0).astype(np.float32)


def _as_floats(outcome: Any, expected: tuple[int, ...]) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # too large for float32 becomes inf, which is refused by its place
            return np.asarray(outcome, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"score returned {type(outcome).__name__}, which is no array of numbers ({error}); expected [B, G] = {expected}"
        ) from error


def _wanted(model: BaseRewardModel, raw: RawRollout) -> dict[str, Any]:
    """The optional parameters that `score` declares."""
    declared = inspect.signature(model.score).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in declared.values())
    return {name: value for name, value in _optional(raw).items() if takes_all or name in declared}


def _optional(raw: RawRollout) -> dict[str, Any]:
    mask, responses = np.asarray(raw.response_mask), np.asarray(raw.responses)
    ids = [
        [row[m].tolist() for row, m in zip(rows, masks, strict=True)]
        for rows, masks in zip(responses, mask, strict=True)
    ]
    return {"metadata": raw.metadata, "token_ids": ids, "finish_reasons": raw.finish_reasons}


def _wait_for(awaitable: Awaitable[Any]) -> Any:
    """The result, from a thread that may itself be inside a running loop."""

    async def wait() -> Any:
        return await awaitable

    future = asyncio.run_coroutine_threadsafe(wait(), _loop())
    try:
        return future.result()
    finally:
        future.cancel()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls: clients that a reward model keeps belong to the loop that they were first used in."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop
