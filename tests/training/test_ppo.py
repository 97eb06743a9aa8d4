"""PPO with a value head in the policy trainer: what it trains when, what it keeps, that it learns. And fates of left-out samples."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from batch_makers import logits_of_rows, make_batch, standard_batch

from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.ops.samples import TrainBatch
from upweight.training.checkpoints import load_checkpoint, save_checkpoint
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import PRESETS, PolicySettings
from upweight.weights.fingerprint import fingerprint

METHOD = {"algorithm": "ppo", "learning_rate": 1e-2, "epochs": 2, "critic": {"learning_rate": 0.1, "warmup_batches": 1}}


@pytest.fixture(scope="module")
def batch(config: DecoderConfig, params: Params) -> TrainBatch:
    return standard_batch(config, params)


@pytest.fixture(scope="module")
def trainer(config: DecoderConfig, params: Params) -> PolicyTrainer:
    return PolicyTrainer(config, params, PolicySettings.from_method({**METHOD, "lora": {"rank": 3}}))


@pytest.fixture(scope="module")
def start(trainer: PolicyTrainer) -> dict:
    return trainer.state()


@pytest.fixture
def fresh(trainer: PolicyTrainer, start: dict) -> PolicyTrainer:
    trainer.load_state(start)
    return trainer


def names(trainer: PolicyTrainer) -> list[str]:
    return [fingerprint(tree) for tree in trainer._trees().values()]


def test_first_batches_train_the_critic_alone(fresh: PolicyTrainer, batch: TrainBatch) -> None:
    policy, state, critic, critic_state = names(fresh)
    served = fingerprint(fresh.policy_params())
    first = fresh.train(batch)
    after = names(fresh)
    assert after[:2] == [policy, state]
    assert after[2] != critic
    assert after[3] != critic_state
    assert fingerprint(fresh.policy_params()) == served
    assert fresh.updates == 0
    assert "grad_norm" not in first.metrics
    assert "learning_rate" not in first.metrics
    assert first.metrics["critic_grad_norm"] > 0
    assert first.fates == ["trained"] * 12
    second = fresh.train(replace(batch, versions=np.where(batch.mask > 0, 1, -1)))
    assert names(fresh)[0] != policy
    assert fresh.updates == 2
    assert second.metrics["grad_norm"] > 0
    assert second.metrics["learning_rate"] == pytest.approx(1e-2)
    assert second.metrics["mismatch_max"] < 1e-5  # the policy has not moved before


def test_first_metrics_in_numbers(fresh: PolicyTrainer, batch: TrainBatch) -> None:
    """The head says 0 everywhere, so with γ = 1 the return of a step is λ^k·r for a reward k steps later."""
    got = fresh.train(batch).metrics
    returns = []
    for i, reward in enumerate(batch.reward.astype(np.float64)):
        count = int(batch.mask[batch.starts[i] : batch.starts[i + 1]].sum())
        returns += [reward * 0.95**k for k in range(count)]
    assert got["value_mean"] == 0.0
    assert got["return_mean"] == pytest.approx(np.mean(returns), rel=1e-5)
    assert got["explained_variance"] == pytest.approx(0.0, abs=1e-5)
    assert got["loss"] == pytest.approx(0.0, abs=1e-5)  # whitened advantages at ratio 1
    assert got["advantage_std"] == pytest.approx(1.0, rel=1e-4)
    assert "kl" not in got
    for _ in range(8):
        later = fresh.train(batch).metrics
    assert later["value_loss"] < got["value_loss"]
    assert later["explained_variance"] > 0.2


def test_a_batch_that_is_not_finite_leaves_policy_and_critic(fresh: PolicyTrainer, batch: TrainBatch) -> None:
    fresh.train(batch)
    before = names(fresh)
    reward = batch.reward.copy()
    reward[2] = np.inf
    report = fresh.train(replace(batch, reward=reward))
    assert report.skipped
    assert names(fresh) == before
    assert all(math.isfinite(value) for value in report.metrics.values())


def test_a_checkpoint_holds_the_critic_and_training_goes_on_bit_for_bit(
    fresh: PolicyTrainer, config: DecoderConfig, params: Params, batch: TrainBatch, tmp_path: Path
) -> None:
    fresh.train(batch)
    path = save_checkpoint(tmp_path, fresh)
    fresh.train(batch)
    fresh.train(batch)
    other = PolicyTrainer(config, params, fresh.settings)
    load_checkpoint(path, other)
    assert other.version == 1
    other.train(batch)
    other.train(batch)
    assert names(other) == names(fresh)


def test_what_is_left_out_has_a_fate(config: DecoderConfig, params: Params, batch: TrainBatch) -> None:
    """Cut by length, far from the sampler, nothing to train: each named, and the rest trains as if alone."""
    cut = np.array([1, 0, 0] * 4, np.uint8)
    far = np.repeat(np.arange(12) % 3 == 1, batch.lengths) & (batch.mask > 0)
    logprobs = np.where(far, batch.logprobs - 3, batch.logprobs).astype(np.float32)
    mask = batch.mask.copy()
    mask[batch.starts[2] : batch.starts[3]] = 0
    odd = replace(batch, truncated=cut, logprobs=logprobs, mask=mask)
    settings = PolicySettings.from_method({"algorithm": "dapo", "correction": "masked", "learning_rate": 1e-2})
    trainer = PolicyTrainer(config, params, settings)
    report = trainer.train(odd)
    want = ["masked", "stale", "masked", *["masked", "stale", "trained"] * 3]
    assert report.fates == want
    for fate in ("trained", "stale", "masked", "refused", "zero_advantage"):
        assert report.metrics[f"samples_{fate}"] == want.count(fate)
    alone = PolicyTrainer(config, params, settings)
    alone.train(odd.select(np.array([5, 8, 11])))
    for got, expected in zip(jax.tree.leaves(trainer.trainable), jax.tree.leaves(alone.trainable), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-3)
    kept = PolicySettings.from_method({"algorithm": "dapo", "mask_truncated": False})
    assert PolicyTrainer(config, params, kept).train(replace(batch, truncated=cut)).fates == ["trained"] * 12


def test_plain_reinforce_skips_what_is_not_finite(config: DecoderConfig, params: Params, batch: TrainBatch) -> None:
    trainer = PolicyTrainer(config, params, PolicySettings.from_method({"algorithm": "reinforce"}))
    report = trainer.train(replace(batch, reward=np.where(np.arange(12) == 2, np.inf, batch.reward).astype(np.float32)))
    assert report.skipped
    assert fingerprint(trainer.policy_params()) == fingerprint(params)
    assert "advantage_std" not in report.metrics


def test_a_batch_of_which_nothing_can_be_trained(fresh: PolicyTrainer) -> None:
    before = names(fresh)
    report = fresh.train(make_batch([([1, 2], [29]), ([4, 5], [])], [1.0, 1.0]))
    assert report.fates == ["refused", "masked"]
    assert names(fresh) == before
    assert fresh.version == 1


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "ppo"])
def test_a_bandit_learns_from_raw_rewards(config: DecoderConfig, params: Params, algorithm: str) -> None:
    """One prompt, one token; one token is rewarded. From p < 0.15 to p > 0.8 in 25 batches of 16."""
    method = {"algorithm": algorithm, "learning_rate": 0.03, "correction": "decoupled"}
    if algorithm == "ppo":
        method |= {"critic": {"learning_rate": 0.05}}
    trainer = PolicyTrainer(config, params, PolicySettings.from_method(method))
    rng = np.random.default_rng(0)

    def chances() -> np.ndarray:
        rows = np.zeros((1, 48), np.int32)
        rows[0, :2] = [3, 1]
        logits = np.asarray(logits_of_rows(config, trainer.policy_params(), rows))[0, 1].astype(np.float64)
        p = np.exp(logits - logits.max())
        return p / p.sum()

    start = chances()
    rewarded = int(np.abs(start - 0.1).argmin())
    for _ in range(25):
        p = chances()
        drawn = rng.choice(29, size=16, p=p).tolist()
        made = make_batch([([3, 1], [token]) for token in drawn], [float(token == rewarded) for token in drawn])
        logprobs = made.logprobs.copy()
        logprobs[made.mask > 0] = np.log(p[drawn])
        trainer.train(replace(made, logprobs=logprobs))
    assert start[rewarded] < 0.15
    assert chances()[rewarded] > 0.8


def test_presets_name_a_critic_only_for_ppo() -> None:
    assert [name for name in PRESETS if PolicySettings.from_method({"algorithm": name}).critic] == ["ppo"]
