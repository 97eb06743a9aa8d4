"""Rewards of a batch → one advantage per sample. Groups are given by number and may be uneven or interleaved.

One signature: (rewards [n], groups [n]) → [n] float32; the table is at the end. A group whose rewards are all equal
(max − min ≤ 1e-6·max(1, |mean|)) has advantage exactly 0 in every row. A reward that is not finite
makes the advantages of its own group not finite, so that the update is skipped, and leaves the other groups alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

EPS = 1e-8


@np.errstate(invalid="ignore")
def group_stats(rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per sample: group mean, population std, group size, and whether the group has no variance."""
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    rewards = rewards.astype(np.float64)
    mean = np.bincount(inverse, rewards) / counts
    var = np.bincount(inverse, (rewards - mean[inverse]) ** 2) / counts
    low = np.full(len(counts), np.inf)
    high = np.full(len(counts), -np.inf)
    np.minimum.at(low, inverse, rewards)
    np.maximum.at(high, inverse, rewards)
    flat = np.isfinite(mean) & (high - low <= 1e-6 * np.maximum(1.0, np.abs(mean)))
    return mean[inverse], np.sqrt(var)[inverse], counts[inverse], flat[inverse]


@np.errstate(invalid="ignore")
def group_normalized(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(r − mean)/(std + 1e-8), population std (GRPO, Shao et al. 2024)."""
    mean, std, _, flat = group_stats(rewards, groups)
    return np.where(flat, 0.0, (rewards - mean) / (std + EPS)).astype(np.float32)


@np.errstate(invalid="ignore")
def group_centered(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """r − mean (Dr. GRPO, Liu et al. 2025)."""
    mean, _, _, flat = group_stats(rewards, groups)
    return np.where(flat, 0.0, rewards - mean).astype(np.float32)


@np.errstate(invalid="ignore")
def leave_one_out(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """r − mean of the others in the group (RLOO, Ahmadian et al. 2024); 0 for a group of one."""
    mean, _, count, flat = group_stats(rewards, groups)
    alone = flat | (count < 2)
    return np.where(alone, 0.0, (rewards - mean) * count / np.maximum(count - 1, 1)).astype(np.float32)


ADVANTAGES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "group": group_normalized,
    "group_centered": group_centered,
    "rloo": leave_one_out,
}
