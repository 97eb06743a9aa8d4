"""The interface that scores responses, and the conversion of what it returns."""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from upweight.online.data import RawRollout


class BaseRewardModel(ABC):
    """Scores responses: a rule, a loaded model or a remote service. `async def score` works as well.

    A `score` that declares any of the keyword parameters `metadata` (list of B dicts), `token_ids` (B × G lists) and
    `finish_reasons` (B × G) is given them.
    """

    @abstractmethod
    def score(self, prompts: list[str], responses: list[list[str]]) -> Any:
        """Rewards [B,G], anything array-like."""


def score_rollout(model: BaseRewardModel, raw: RawRollout) -> np.ndarray:
    """float32 [B,G]; `ValueError` naming the shape or the first entry that is not finite."""
    declared = inspect.signature(model.score).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in declared.values())
    extra = {name: value for name, value in _optional(raw).items() if takes_all or name in declared}
    outcome = model.score(raw.prompt_texts, raw.response_texts, **extra)
    if inspect.isawaitable(outcome):
        outcome = _run(outcome)
    rewards = np.asarray(outcome, dtype=np.float32)
    expected = raw.responses.shape[:2]
    if rewards.shape != expected:
        raise ValueError(f"score returned shape {rewards.shape}; expected [B, G] = {expected}")
    bad = np.argwhere(~np.isfinite(rewards))
    if len(bad):
        b, g = bad[0].tolist()
        raise ValueError(f"score returned {rewards[b, g]} for prompt {b}, response {g}; rewards must be finite")
    return rewards


def _optional(raw: RawRollout) -> dict[str, Any]:
    mask, responses = np.asarray(raw.response_mask), np.asarray(raw.responses)
    ids = [
        [row[m].tolist() for row, m in zip(rows, masks, strict=True)]
        for rows, masks in zip(responses, mask, strict=True)
    ]
    return {"metadata": raw.metadata, "token_ids": ids, "finish_reasons": raw.finish_reasons}


def _run(awaitable: Any) -> Any:
    """The result of a coroutine, on a loop of its own: the caller may be inside a running one."""

    async def wait() -> Any:
        return await awaitable

    outcome: list[Any] = []
    problem: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(asyncio.run(wait()))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            problem.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    if problem:
        raise problem[0]
    return outcome[0]
