"""What dapo adds to a job beside its clip: groups without variance that leave the batch, and punishment of long answers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from batch_makers import make_batch, sampled_by, standard_samples

from tests.training.test_estimators import gap, updates_of
from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.ops.samples import TrainBatch
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import PolicySettings
from upweight.training.token_advantages import last_turns, sample_advantages

GROUPS = [0, 1, 2, 3] * 3
REWARD = [0.5, 1.0, 0.0, 0.7, 0.5, 0.0, 0.0, 0.7, 0.5, 1.0, 1.0, 0.7]  # those of groups 0 and 3 are equal


def settings_of(algorithm: str = "dapo", **options: Any) -> PolicySettings:
    return PolicySettings.from_method({"algorithm": algorithm, "advantage": "group", "learning_rate": 1e-2, **options})


@pytest.fixture(scope="module")
def batch(config: DecoderConfig, params: Params) -> TrainBatch:
    return sampled_by(config, params, make_batch(standard_samples()[0], REWARD, group=GROUPS))


def test_groups_without_variance_are_as_if_they_had_not_been_drawn(
    config: DecoderConfig, params: Params, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, others = PolicyTrainer(config, params, settings_of(entropy_coeff=0.1)), np.isin(GROUPS, (1, 2))
    start = trainer.state()
    (all_of_it,), metrics = updates_of(trainer, batch, monkeypatch)
    assert metrics["num_tokens"] == batch.mask[np.repeat(others, batch.lengths)].sum() < batch.mask.sum()
    assert (metrics["samples_trained"], metrics["samples_zero_advantage"]) == (6, 6)
    trainer.load_state(start)
    (alone,), of_alone = updates_of(trainer, batch.select(np.flatnonzero(others)), monkeypatch)
    assert gap(all_of_it.grads, alone.grads) < 1e-5
    assert all_of_it.loss == pytest.approx(alone.loss, rel=1e-5)
    assert metrics["entropy"] == pytest.approx(of_alone["entropy"], rel=1e-5)


def test_a_batch_of_such_groups_alone_makes_no_update(config: DecoderConfig, params: Params, batch: TrainBatch) -> None:
    trainer = PolicyTrainer(config, params, settings_of(entropy_coeff=0.1))
    report = trainer.train(batch.select(np.flatnonzero(np.isin(GROUPS, (0, 3)))))
    assert report.fates == ["zero_advantage"] * 6
    assert trainer.trainable is params
    assert "loss" not in report.metrics
    kept = PolicyTrainer(config, params, settings_of(filter_flat_groups=False))
    assert kept.settings.preset.filter_flat_groups is False


def test_long_answers_are_punished() -> None:
    """Limit 10, buffer 4: no punishment up to 6 tokens, 1 at 10; only the last turn counts."""
    lengths = (3, 6, 7, 8, 10, 10)
    batch = make_batch([([1, 2], [5] * length) for length in lengths], [0.5] * 6, group=[0] * 6)
    ends = np.cumsum(batch.lengths)
    mask = batch.mask.copy()
    mask[ends[-1] - 5] = 0  # the last sample's last turn has 4 tokens
    batch = replace(batch, mask=mask)
    assert last_turns(batch).tolist() == [3, 6, 7, 8, 10, 4]
    lowered = np.array([0.5, 0.5, 0.25, 0.0, -0.5, 0.5])
    options = {"overlong_buffer": 4, "sampling": {"max_tokens": 10}}
    found = sample_advantages(settings_of("dr_grpo", **options), batch, np.arange(6))
    np.testing.assert_allclose(found.advantages, lowered - lowered.mean(), rtol=1e-6)
    raw = PolicySettings.from_method({"algorithm": "reinforce", **options})
    np.testing.assert_allclose(sample_advantages(raw, batch, np.arange(6)).advantages, lowered, rtol=1e-6)
    off = sample_advantages(settings_of("dr_grpo", sampling={"max_tokens": 10}), batch, np.arange(6))
    assert not off.advantages.any()
    given = PolicySettings.from_method({"algorithm": "dr_grpo", **options})
    assert sample_advantages(given, batch, np.arange(6)).advantages.tolist() == [0.5] * 6


def test_an_update_takes_the_lowered_rewards(
    config: DecoderConfig, params: Params, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = PolicyTrainer(config, params, settings_of("grpo", overlong_buffer=8, sampling={"max_tokens": 14}))
    start = trainer.state()
    (punished,), _ = updates_of(trainer, batch, monkeypatch)
    trainer.load_state(start)
    trainer.settings = settings_of("grpo", sampling={"max_tokens": 14})
    answers = np.array([len(answer) for _, answer in standard_samples()[0]])
    lowered = batch.reward - np.clip((answers - 6) / 8, 0, 1).astype(np.float32)
    assert (lowered < batch.reward).sum() > 2
    (by_hand,), _ = updates_of(trainer, replace(batch, reward=lowered), monkeypatch)
    assert gap(punished.grads, by_hand.grads) < 1e-6
