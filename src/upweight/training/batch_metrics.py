"""What a trained batch was like, in numbers (numpy only)."""

from __future__ import annotations

import math

import numpy as np

from upweight.ops.advantages import group_stats
from upweight.ops.samples import TrainBatch
from upweight.training.fates import FATES


def join_reports(reports: list[dict[str, float]], epochs: int) -> dict[str, float]:
    """One report of all updates of a batch: token counts of one pass, greatest of a maximum, last rate, else token means."""
    weights = [report["num_tokens"] for report in reports]
    joined = {}
    for name in reports[0]:
        values = [report[name] for report in reports]
        if name in ("num_tokens", "packed_tokens"):
            joined[name] = sum(values) / epochs
        elif name == "update_skipped":
            joined[name] = sum(values) / len(values)
        elif name.endswith("_max"):
            joined[name] = max(values)
        else:
            joined[name] = values[-1] if name == "learning_rate" else float(np.average(values, weights=weights))
    return joined


def behaviour_logprobs(batch: TrainBatch) -> np.ndarray:
    """Sampler log-probs on the trainer's support, NaN where unknown.

    Filters renormalise what the sampler reports; the trainer's softmax covers the whole vocabulary, so such tokens are
    compared by their raw log-probs, which are those of the same temperature.
    """
    return np.where(batch.filtered > 0, batch.raw_logprobs, batch.logprobs).astype(np.float32)


def unusable(batch: TrainBatch) -> np.ndarray:
    """bool [n]: samples with a trained token whose uploaded log-prob is not finite. They spoil the update, visibly."""
    bad = (batch.mask > 0) & ~np.isfinite(batch.logprobs) & ~(batch.filtered > 0)
    return np.bincount(np.repeat(np.arange(batch.num_samples), batch.lengths)[bad], minlength=batch.num_samples) > 0


def mismatch(batch: TrainBatch, logprobs: np.ndarray, version: int) -> dict[str, float]:
    """|Δlog-prob| between sampler and trainer over tokens that this very version sampled; absent without such tokens.

    Samples that lived through a weight swap stand apart: their later tokens were drawn over keys and values of older weights.
    """
    on_policy = (batch.versions == version) & np.isfinite(logprobs)
    swapped = np.repeat(_versions_per_sample(batch) > 1, batch.lengths)
    gap = np.abs(logprobs - behaviour_logprobs(batch))
    plain, apart = (gap[on_policy & which & np.isfinite(gap)] for which in (~swapped, swapped))
    metrics = {"on_policy_tokens": float(len(plain))}
    if len(plain):
        metrics |= {"mismatch_max": float(plain.max()), "mismatch_mean": float(plain.mean())}
    if len(apart):
        metrics |= {"swapped_tokens": float(len(apart)), "mismatch_swapped_max": float(apart.max())}
    return metrics


def _versions_per_sample(batch: TrainBatch) -> np.ndarray:
    """int [n], how many weights versions drew each sample's tokens."""
    sample = np.repeat(np.arange(batch.num_samples), batch.lengths)
    drawn = batch.versions >= 0
    pairs = np.unique(np.stack([sample[drawn], batch.versions[drawn]]), axis=1)
    return np.bincount(pairs[0], minlength=batch.num_samples)


def batch_metrics(batch: TrainBatch, advantages: np.ndarray, fates: list[str]) -> dict[str, float]:
    trained_tokens = np.diff(np.concatenate([[0], np.cumsum(batch.mask, dtype=np.int64)])[batch.starts])
    _, _, counts, flat = group_stats(batch.reward, batch.group)
    groups = len(np.unique(batch.group))
    zero_groups = len(np.unique(batch.group[flat & (counts > 1)]))
    return {
        "normalized_reward_mean": float(batch.reward.mean()),
        "advantage_std": spread(advantages),
        "response_length_mean": float(trained_tokens.mean()),
        "groups": float(groups),
        "zero_variance_groups": float(zero_groups),
    } | {f"samples_{name}": float(fates.count(name)) for name in FATES}


def spread(values: np.ndarray) -> float:
    """Standard deviation; NaN when any value is not finite."""
    return float(values.std()) if np.isfinite(values).all() else math.nan


def critic_metrics(values: np.ndarray, returns: np.ndarray, kept: np.ndarray) -> dict[str, float]:
    """Of the critic before the batch's first update, over the trained tokens; `explained_variance` where returns vary.

    Nothing of numbers that are not finite: their update is skipped.
    """
    value, ret = values[kept > 0].astype(np.float64), returns[kept > 0].astype(np.float64)
    if not (np.isfinite(value).all() and np.isfinite(ret).all() and len(ret)):
        return {}
    metrics = {"value_mean": float(value.mean()), "return_mean": float(ret.mean())}
    if ret.var() > 1e-6 * np.mean(ret**2):
        metrics["explained_variance"] = float(1.0 - (ret - value).var() / ret.var())
    return metrics
