"""Rewards of a batch → one advantage per sample.

Two forms of the same formulas: `ADVANTAGES` (numpy) takes groups by number, which may be uneven or interleaved;
`grouped_advantages` (JAX, differentiable) takes contiguous groups of one size.

A group whose rewards are all equal (max − min ≤ 1e-6·max(1, |mean|)) has advantage exactly 0 in every row. A reward that is not
finite makes the advantages of its own group not finite, so that the update is skipped, and leaves the other groups alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

EPS = 1e-8


class GroupStats(NamedTuple):
    """Of the group that each sample belongs to; all [n] or broadcast to it."""

    mean: Any
    std: Any
    count: Any
    flat: Any  # the group has no variance


Formula = Callable[[Any, GroupStats, Any], Any]


def normalized(rewards: Any, stats: GroupStats, xp: Any) -> Any:
    """(r − mean)/(std + 1e-8) (GRPO, Shao et al. 2024)."""
    return xp.where(stats.flat, 0.0, (rewards - stats.mean) / (stats.std + EPS))


def centered(rewards: Any, stats: GroupStats, xp: Any) -> Any:
    """r − mean (Dr. GRPO, Liu et al. 2025)."""
    return xp.where(stats.flat, 0.0, rewards - stats.mean)


def less_the_others(rewards: Any, stats: GroupStats, xp: Any) -> Any:
    """r − mean of the others in the group (RLOO, Ahmadian et al. 2024); 0 for a group of one."""
    scale = stats.count / xp.maximum(stats.count - 1, 1)
    return xp.where(stats.flat | (stats.count < 2), 0.0, (rewards - stats.mean) * scale)


FORMULAS: dict[str, Formula] = {"group": normalized, "group_centered": centered, "rloo": less_the_others}


@np.errstate(invalid="ignore")
def group_stats(rewards: np.ndarray, groups: np.ndarray) -> GroupStats:
    """Per sample: group mean, population std, group size, and whether the group has no variance."""
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    rewards = rewards.astype(np.float64)
    mean = np.bincount(inverse, rewards) / counts
    var = np.bincount(inverse, (rewards - mean[inverse]) ** 2) / counts
    low = np.full(len(counts), np.inf)
    high = np.full(len(counts), -np.inf)
    np.minimum.at(low, inverse, rewards)
    np.maximum.at(high, inverse, rewards)
    flat = np.isfinite(mean) & is_flat(low, high, mean, np)
    return GroupStats(mean[inverse], np.sqrt(var)[inverse], counts[inverse], flat[inverse])


def is_flat(low: Any, high: Any, mean: Any, xp: Any) -> Any:
    """The rule of a group without variance, from its least and greatest reward and its mean."""
    return high - low <= 1e-6 * xp.maximum(1.0, xp.abs(mean))


def _by_number(name: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    @np.errstate(invalid="ignore")
    def advantages(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return FORMULAS[name](rewards, group_stats(rewards, groups), np).astype(np.float32)

    return advantages


# (rewards [n], groups [n]) → [n] float32
ADVANTAGES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {name: _by_number(name) for name in FORMULAS}
