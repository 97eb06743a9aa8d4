"""Rewards of a batch → one advantage per trained token, by the estimators of `ops`.

Invariants:
* Whitening takes all trained tokens of the whole batch at once, so minibatches, micro-batches, packing and the order of the
  samples have no say in it.
* A terminal reward stands at the last trained token; what lies between two turns is no time step.
* A group has the statistics of all its stored samples, also of those that are not trained.
* A KL in the reward is taken off before rewards are compared or summed up. Samples that are not scored here (those of other
  batches among them) enter the statistics with their reward alone: no baseline of others moves the expected gradient.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from upweight.ops.advantages import ADVANTAGES, group_stats
from upweight.ops.corrections import overlong_punishment
from upweight.ops.masked_stats import masked, masked_normalize
from upweight.ops.packing import power_bucket
from upweight.ops.policy_loss import KL_ESTIMATORS
from upweight.ops.returns import at_last_action, discounted_returns, gae
from upweight.ops.samples import TrainBatch
from upweight.training.settings import FROM_REWARD, PolicySettings


class PolicyNumbers(NamedTuple):
    """Of the policy before the batch's first update at the flat places of a batch, float32 [T]; None where not computed."""

    logprobs: np.ndarray | None = None
    reference: np.ndarray | None = None  # log-probs of the start model
    kl: np.ndarray | None = None  # Σ π(log π − log π_start), the estimator "exact"
    values: np.ndarray | None = None  # of the critic


class TokenAdvantages(NamedTuple):
    """Float32 [T], 0 where nothing is trained."""

    advantages: np.ndarray
    returns: np.ndarray | None = None  # what the critic is to tell


def kl_of_reward(settings: PolicySettings, batch: TrainBatch, before: PolicyNumbers) -> np.ndarray | None:
    """Float32 [T], 0 where nothing is trained: what is taken off the rewards, before its factor; None where nothing is."""
    if not settings.kl_in_reward or not batch.targets.any():
        return None
    steps = Steps(batch)
    return steps.gather(_kl(settings, steps, before))


class SampleAdvantages(NamedTuple):
    advantages: np.ndarray  # float32 [n]
    flat: np.ndarray  # bool [n], of a group without variance, where groups are compared


def sample_advantages(
    settings: PolicySettings, batch: TrainBatch, scored: np.ndarray, kl: np.ndarray | None = None
) -> SampleAdvantages:
    """Rewards less the punishment of long answers, as they are or compared within their groups.

    Of the samples at the indices `scored` the tokens' `kl` is known, laid end to end; where groups are compared, its sum over
    an answer lowers the reward.
    """
    rewards = batch.reward.astype(np.float64)
    if settings.preset.overlong_buffer is not None and settings.advantage != "given":
        limits = settings.max_response_length, settings.preset.overlong_buffer
        rewards += np.asarray(overlong_punishment(jnp.asarray(last_turns(batch)), *limits))
    if not settings.compares_groups:
        return SampleAdvantages(rewards.astype(np.float32), np.zeros(batch.num_samples, bool))
    if kl is not None:
        rewards[scored] -= settings.beta * _sums(kl, batch.lengths[scored])
    rewards = np.concatenate([rewards, batch.peer_reward])
    groups = np.concatenate([batch.group, batch.peer_group])
    own = slice(batch.num_samples)
    return SampleAdvantages(
        ADVANTAGES[settings.preset.advantage](rewards, groups)[own], group_stats(rewards, groups).flat[own]
    )


def last_turns(batch: TrainBatch) -> np.ndarray:
    """int32 [n]: trained tokens of each sample's last turn, which is what the length limit is for."""
    found = np.zeros(batch.num_samples, np.int32)
    for i, (start, end) in enumerate(pairwise(batch.starts.tolist())):
        trained = np.flatnonzero(batch.mask[start:end])
        apart = np.flatnonzero(np.diff(trained) > 1)
        found[i] = len(trained) - (apart[-1] + 1 if len(apart) else 0)
    return found


def token_advantages(
    settings: PolicySettings,
    batch: TrainBatch,
    per_sample: np.ndarray,
    kept: np.ndarray,
    before: PolicyNumbers,
    kl: np.ndarray | None = None,
) -> TokenAdvantages:
    """From `sample_advantages` and `kl_of_reward`. `kept` uint8 [T]: the tokens of `batch.targets` that enter the loss; the others are time steps too."""
    if not settings.makes_advantages:
        return TokenAdvantages(np.repeat(per_sample, batch.lengths).astype(np.float32))
    steps = Steps(batch)
    mask, reward, inside = steps.mask, steps.per_row(per_sample), steps.spread(kept)
    found = returns = None
    if settings.preset.advantage in FROM_REWARD:
        rewards = at_last_action(reward, mask)
        if kl is not None:
            rewards = rewards - settings.beta * steps.spread(kl)
        found, returns = _estimated(settings, steps, rewards, before)
    else:
        found = masked(jnp.broadcast_to(reward[:, None], mask.shape), mask)
    if settings.preset.whiten and int(np.asarray(kept)[steps.places].sum()) > 1:
        found = masked_normalize(found, inside)
    return TokenAdvantages(*(None if x is None else steps.gather(x) for x in (found, returns)))  # type: ignore[arg-type]


def _sums(flat: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Float64 [n], of each sample's part of [T]."""
    return np.bincount(np.repeat(np.arange(len(lengths)), lengths), flat, minlength=len(lengths))


def _kl(settings: PolicySettings, steps: Steps, before: PolicyNumbers) -> jax.Array:
    name = settings.preset.kl_estimator
    if name == "exact":
        assert before.kl is not None
        return masked(steps.spread(before.kl), steps.mask)
    assert before.logprobs is not None
    assert before.reference is not None
    return KL_ESTIMATORS[name](steps.spread(before.logprobs), steps.spread(before.reference), steps.mask)


def _estimated(
    settings: PolicySettings, steps: Steps, rewards: jax.Array, before: PolicyNumbers
) -> tuple[jax.Array, jax.Array | None]:
    """(advantages, what a critic should have said)."""
    critic = settings.critic
    if critic is None:
        return discounted_returns(rewards, steps.mask, 1.0), None
    assert before.values is not None
    values = steps.spread(before.values)
    found = gae(rewards, values, steps.mask, critic.gamma, critic.gae_lambda)
    return found, found + masked(values, steps.mask)


class Steps:
    """The targets of a batch as rows of time steps, [B,A] with a power of two of rows and columns (few shapes, few programs)."""

    def __init__(self, batch: TrainBatch) -> None:
        self.places = np.flatnonzero(batch.targets)
        self._row = np.repeat(np.arange(batch.num_samples), batch.lengths)[self.places]
        count = np.bincount(self._row, minlength=batch.num_samples)
        self._column = np.arange(len(self.places)) - (np.cumsum(count) - count)[self._row]
        self._shape = power_bucket(batch.num_samples, 8), power_bucket(int(count.max(initial=1)), 16)
        self._total = len(batch.token_ids)
        self.mask = self.spread(np.ones(self._total, np.float32))

    def spread(self, flat: np.ndarray) -> jax.Array:
        """[T] → float32 [B,A], 0 beyond a row's end."""
        rows = np.zeros(self._shape, np.float32)
        rows[self._row, self._column] = flat[self.places]
        return jnp.asarray(rows)

    def per_row(self, per_sample: np.ndarray) -> jax.Array:
        return jnp.asarray(np.pad(per_sample.astype(np.float32), (0, self._shape[0] - len(per_sample))))

    def gather(self, rows: jax.Array) -> np.ndarray:
        """[B,A] → float32 [T], 0 where nothing is trained."""
        flat = np.zeros(self._total, np.float32)
        flat[self.places] = np.asarray(rows)[self._row, self._column]
        return flat
