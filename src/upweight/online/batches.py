"""Scored rollouts → what trainers take.

Invariants
- Positions and masks come from the rollout's own masks, never from token values; padding is left out.
- A row without a response is in no group and in no loss.
- `logprobs_old` enters a ratio only when the trainer can compute the same transform; rollouts of different transforms are
  never mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from upweight.errors import ConfigError, TrainingError
from upweight.online.data import RolloutResult, SamplingTransform
from upweight.ops.samples import TrainBatch

SAME_LOGPROB = 1e-4  # raw and sampling log-probs of an untransformed distribution differ by less


def train_batch(*results: RolloutResult) -> TrainBatch:
    """The valid responses of one or several results as one batch; each prompt of each result is a group.

    `ConfigError` when the transforms of the results differ, when a trainer cannot repeat theirs (filters, penalties, greedy),
    or when `logprobs_old` are not of the transform that a result names. `TrainingError` when no response is valid.
    """
    transform = one_transform(results)
    rows = [row for number, result in enumerate(results) for row in _rows(result, number, transform)]
    if not rows:
        raise TrainingError("no response of the rollout is valid: there is nothing to train on")
    _, groups = np.unique([(row.result, row.prompt) for row in rows], axis=0, return_inverse=True)
    masks = [np.repeat([0, 1], [len(row.prompt_ids), len(row.response_ids)]) for row in rows]
    mask = np.concatenate(masks).astype(np.uint8)
    placed = mask > 0

    def per_token(values: Sequence[np.ndarray], fill: float, dtype: type) -> np.ndarray:
        out: np.ndarray = np.full(len(mask), fill, dtype)
        out[placed] = np.concatenate(values)
        return out

    return TrainBatch(
        lengths=np.array([len(m) for m in masks], np.int32),
        token_ids=np.concatenate([part for row in rows for part in (row.prompt_ids, row.response_ids)]).astype(
            np.int32
        ),
        logprobs=per_token([row.logprobs for row in rows], 0.0, np.float32),
        mask=mask,
        reward=np.array([row.reward for row in rows], np.float32),
        group=groups.reshape(-1).astype(np.int32),
        temperature=np.where(placed, transform.temperature, 1.0).astype(np.float32),
        raw_logprobs=per_token([row.raw_logprobs for row in rows], np.nan, np.float32),
        versions=per_token([row.versions for row in rows], -1, np.int32),
        filtered=np.zeros(len(mask), np.uint8),
        matched=np.ones(len(rows), np.uint8),
        truncated=np.array([row.truncated for row in rows], np.uint8),
    )


def check_transform(transform: SamplingTransform) -> None:
    """`ConfigError` for a distribution that a trainer cannot compute again."""
    changed = transform.not_recomputable
    if changed:
        named = ", ".join(f"{name} = {value}" for name, value in changed.items())
        raise ConfigError(
            f"rollouts drawn with {named} cannot be trained on, because a trainer cannot compute logprobs_old of that "
            "distribution again: use temperature > 0, top_k 0, top_p 1, frequency_penalty 0 and min_tokens 0"
        )


@dataclass(frozen=True, kw_only=True)
class PreferencePairs:
    """Best and worst response of each prompt whose valid rewards differ, N pairs, prompt and response joined.

    ids int32 [N,S] padded on the right with 0; masks bool [N,S].
    """

    chosen_ids: np.ndarray
    chosen_mask: np.ndarray  # real tokens
    chosen_response_mask: np.ndarray  # tokens that are scored, given the prompt
    rejected_ids: np.ndarray
    rejected_mask: np.ndarray
    rejected_response_mask: np.ndarray
    tied_groups: int  # prompts left out: fewer than two valid responses, or all rewards equal


def preference_pairs(result: RolloutResult) -> PreferencePairs:
    """For preference losses on log p(response | prompt). The first of equally good (or bad) responses is taken."""
    rows = _rows(result, 0, SamplingTransform())
    chosen, rejected = [], []
    for b in range(len(result.prompts)):
        group = [row for row in rows if row.prompt == b]
        best, worst = max(group, key=_reward, default=None), min(group, key=_reward, default=None)
        if best is not None and worst is not None and best.reward > worst.reward:
            chosen.append(best)
            rejected.append(worst)
    width = max((len(row.prompt_ids) + len(row.response_ids) for row in chosen + rejected), default=0)
    return PreferencePairs(
        **dict(zip(("chosen_ids", "chosen_mask", "chosen_response_mask"), _joined(chosen, width), strict=True)),
        **dict(zip(("rejected_ids", "rejected_mask", "rejected_response_mask"), _joined(rejected, width), strict=True)),
        tied_groups=len(result.prompts) - len(chosen),
    )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One valid response without padding."""

    result: int
    prompt: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    truncated: bool  # by its length limit


def _reward(row: _Row) -> float:
    return row.reward


def _rows(result: RolloutResult, number: int, transform: SamplingTransform) -> list[_Row]:
    if result.prompt_mask is None:
        raise ConfigError("prompt_mask is None: a rollout must say which tokens of its prompts are real")
    prompts, prompt_mask = np.asarray(result.prompts), np.asarray(result.prompt_mask, bool)
    responses, mask = np.asarray(result.responses), np.asarray(result.response_mask, bool)
    old, rewards = np.asarray(result.logprobs_old, np.float32), np.asarray(result.rewards, np.float32)
    raw = np.full(old.shape, np.nan, np.float32) if result.logprobs_raw is None else np.asarray(result.logprobs_raw)
    check_logprobs(old, raw, mask, transform)
    valid = mask.any(-1) if result.valid is None else np.asarray(result.valid, bool) & mask.any(-1)
    versions = _versions(result)
    return [
        _Row(
            result=number,
            prompt=b,
            prompt_ids=prompts[b][prompt_mask[b]],
            response_ids=responses[b, g][mask[b, g]],
            logprobs=old[b, g][mask[b, g]],
            raw_logprobs=raw[b, g][mask[b, g]],
            versions=versions[b, g][mask[b, g]],
            reward=float(rewards[b, g]),
            truncated=bool(result.finish_reasons) and result.finish_reasons[b][g] == "length",
        )
        for b, g in np.argwhere(valid).tolist()
    ]


def _versions(result: RolloutResult) -> np.ndarray:
    """int32 [B,G,R], −1 where unknown."""
    if result.token_versions is not None:
        return np.asarray(result.token_versions, np.int32)
    if result.weights_version is None:
        return np.full(result.responses.shape, -1, np.int32)
    return np.broadcast_to(np.asarray(result.weights_version, np.int32)[:, :, None], result.responses.shape)


def one_transform(results: Sequence[RolloutResult]) -> SamplingTransform:
    """The transform of all results; `ConfigError` when they differ or a trainer cannot repeat it. A result that names none is taken as drawn from the model's own distribution."""
    found = list(dict.fromkeys(result.transform or SamplingTransform() for result in results))
    if not found:
        raise TrainingError("no rollout was given")
    if len(found) > 1:
        raise ConfigError(f"rollouts of different distributions in one batch: {found[0]} and {found[1]}; use one")
    check_transform(found[0])
    return found[0]


def check_logprobs(old: np.ndarray, raw: np.ndarray, mask: np.ndarray, transform: SamplingTransform) -> None:
    """`ConfigError` when `old` is not of the distribution that the transform names."""
    gap = np.where(mask & np.isfinite(raw), np.abs(old - raw), 0.0)
    if transform == SamplingTransform() and gap.max(initial=0.0) > SAME_LOGPROB:
        raise ConfigError(
            f"logprobs_old differ from logprobs_raw by up to {gap.max():.4g}, but the rollout says it was drawn at "
            "temperature 1 without filters and penalties: name its transform"
        )


def _joined(rows: Sequence[_Row], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.zeros((len(rows), width), np.int32)
    real, scored = np.zeros((2, len(rows), width), bool)
    for n, row in enumerate(rows):
        start, end = len(row.prompt_ids), len(row.prompt_ids) + len(row.response_ids)
        ids[n, :start], ids[n, start:end] = row.prompt_ids, row.response_ids
        real[n, :end] = True
        scored[n, start:end] = True
    return ids, real, scored
