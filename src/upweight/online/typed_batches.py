"""Scored rollouts → the typed batches of `upweight.training.rl`.

Invariants
- Rows are real tokens first and padding last, whatever side the rollout padded.
- Every response keeps its row, so that groups stay whole; what is not valid has `valid` False and an empty mask.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from upweight.errors import ConfigError
from upweight.online.batches import check_logprobs, one_transform
from upweight.online.data import RolloutResult
from upweight.training.rl.generations import GeneratedSequenceBatch
from upweight.training.rl.rollouts import GroupRolloutBatch, SequenceRolloutBatch


def rollout_batch(result: RolloutResult) -> GroupRolloutBatch[SequenceRolloutBatch]:
    """One group of G rows for each of B prompts: rewards, log-probs of the sampler as `old_log_probs`, and its temperature.

    `REINFORCETrainer` and `PPOTrainer` take it as it is or its `rollout`, `GRPOTrainer` as it is. `ConfigError` for a rollout
    that a trainer cannot compute again, as of `train_batch`.
    """
    if result.prompt_mask is None:
        raise ConfigError("prompt_mask is None: a rollout must say which tokens of its prompts are real")
    transform = one_transform([result])
    prompts, prompt_mask = np.asarray(result.prompts), np.asarray(result.prompt_mask, bool)
    responses, mask = np.asarray(result.responses), np.asarray(result.response_mask, bool)
    old = np.asarray(result.logprobs_old, np.float32)
    raw = np.full(old.shape, np.nan, np.float32) if result.logprobs_raw is None else np.asarray(result.logprobs_raw)
    check_logprobs(old, raw, mask, transform)
    valid = np.any(mask, axis=-1)
    if result.valid is not None:
        valid = np.logical_and(valid, np.asarray(result.valid))
    count, size = valid.shape
    width = int((prompt_mask.sum(-1)[:, None] + mask.sum(-1)).max())
    tokens, answer = np.zeros((2, count * size, width), np.int32)
    prompt = np.zeros((count * size, width), np.int32)
    logprobs = np.zeros((2, count * size, width), np.float32)
    for row, (b, g) in enumerate(np.ndindex(count, size)):
        ids, own = prompts[b][prompt_mask[b]], mask[b, g]
        start, end = len(ids), len(ids) + int(own.sum())
        tokens[row, :start], tokens[row, start:end] = ids, responses[b, g][own]
        prompt[row, :start], answer[row, start:end] = 1, bool(valid[b, g])
        logprobs[:, row, start:end] = old[b, g][own], raw[b, g][own]
    sequences = GeneratedSequenceBatch.from_sequences(
        jnp.asarray(tokens),
        rewards=jnp.where(valid, result.rewards, 0.0).astype(jnp.float32).reshape(-1),
        prompt_mask=jnp.asarray(prompt),
        response_mask=jnp.asarray(answer),
    )
    rollout = SequenceRolloutBatch(
        sequences,
        old_log_probs=jnp.asarray(logprobs[0, :, 1:]),
        raw_log_probs=None if result.logprobs_raw is None else jnp.asarray(logprobs[1, :, 1:]),
        temperature=None if transform.temperature == 1 else jnp.full(count * size, transform.temperature, jnp.float32),
        valid=jnp.asarray(valid.reshape(-1)),
    )
    return GroupRolloutBatch(rollout=rollout, group_size=size)
