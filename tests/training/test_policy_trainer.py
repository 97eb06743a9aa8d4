"""The trainer as a whole, in numbers: what an update does, and what leaves everything as it was."""

import math
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from batch_makers import logits_of_rows, logprobs_alone, make_batch, sampled_by, standard_batch

from upweight.errors import TrainingError
from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.models.lora import merge
from upweight.ops.samples import TrainBatch
from upweight.training.batch_metrics import behaviour_logprobs
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import PRESETS, LoraSettings, PolicySettings
from upweight.weights.fingerprint import fingerprint

# Of log-probs in float32: XLA adds in other orders in other programs, more so when it does not optimise.
NOISE = 3e-5
METRICS_TOLD = set(re.findall(r"`(\w+)`", (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()))
PLAIN = PolicySettings(learning_rate=1e-3)
LORA = LoraSettings(rank=4, alpha=8)


@pytest.fixture(scope="module")
def batch(config: DecoderConfig, params: Params) -> TrainBatch:
    return standard_batch(config, params)


@pytest.fixture(scope="module")
def plain(config: DecoderConfig, params: Params) -> PolicyTrainer:
    """One trainer for many tests, so that its programs are compiled once; `fresh` puts it back to the start."""
    return PolicyTrainer(config, params, PLAIN)


@pytest.fixture(scope="module")
def start(plain: PolicyTrainer) -> dict:
    return plain.state()


@pytest.fixture
def fresh(plain: PolicyTrainer, start: dict) -> PolicyTrainer:
    plain.load_state(start)
    return plain


def names(trainer: PolicyTrainer) -> tuple[str, str]:
    return fingerprint(trainer.trainable), fingerprint(trainer.optimizer_state)


def test_no_learning_rate_no_change(config: DecoderConfig, params: Params, batch: TrainBatch) -> None:
    trainer = PolicyTrainer(config, params, replace(PLAIN, learning_rate=0.0))
    before = fingerprint(params)
    gaps = []
    for version in range(3):
        report = trainer.train(replace(batch, versions=np.where(batch.mask > 0, version, -1)))
        assert fingerprint(trainer.policy_params()) == before
        assert report.metrics["on_policy_tokens"] == batch.mask.sum()
        gaps.append(report.metrics["mismatch_max"])
    assert gaps[0] < NOISE
    assert len(set(gaps)) == 1
    assert trainer.version == 3


def test_first_report(fresh: PolicyTrainer, batch: TrainBatch) -> None:
    report = fresh.train(batch)
    got = report.metrics
    assert report.version == fresh.version == 1
    assert not report.skipped
    assert report.fates == ["trained"] * 12
    assert got["update_skipped"] == 0.0
    # Ratio 1 everywhere, so the loss is −mean over samples of the advantage.
    assert got["loss"] == pytest.approx(-float(batch.reward.mean()), abs=1e-5)
    assert got["ratio_mean"] == got["ratio_max"] == 1.0
    assert got["is_weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert got["approx_kl"] == got["clip_fraction_low"] == got["clip_fraction_high"] == 0.0
    assert got["mismatch_max"] < NOISE
    assert got["logprob_mean"] == pytest.approx(float(batch.logprobs[batch.mask > 0].mean()), abs=1e-5)
    assert got["num_tokens"] == batch.mask.sum()
    assert got["response_length_mean"] == pytest.approx(batch.mask.sum() / 12)
    assert got["learning_rate"] == pytest.approx(1e-3)
    assert got["grad_norm"] > 0
    assert "kl" not in got
    assert got.keys() <= METRICS_TOLD
    assert "entropy" not in got


def test_mismatch_is_large_when_one_tensor_was_changed(
    config: DecoderConfig, params: Params, fresh: PolicyTrainer, batch: TrainBatch
) -> None:
    first, second = params["layers"]
    other = {**params, "layers": [first, {**second, "down": second["down"] * 1.02}]}
    report = fresh.train(sampled_by(config, other, batch))
    assert report.metrics["mismatch_max"] > 1e-3
    # Tokens of another version say nothing about the hand-over.
    fresh.version = 5
    assert "mismatch_max" not in fresh.train(batch).metrics


def test_samples_that_lived_through_a_swap_are_compared_apart(fresh: PolicyTrainer, batch: TrainBatch) -> None:
    drawn = np.flatnonzero(batch.mask[: batch.lengths[0]])
    assert len(drawn) > 1
    versions, logprobs = np.where(batch.mask > 0, 1, -1), batch.logprobs.copy()
    versions[drawn[0]] = 0  # the first sample's first token is older, and what follows it is off
    logprobs[drawn[1]] -= 0.5
    fresh.version = 1
    got = fresh.train(replace(batch, versions=versions, logprobs=logprobs)).metrics
    assert got["mismatch_max"] < NOISE
    assert got["mismatch_swapped_max"] == pytest.approx(0.5, abs=1e-4)
    assert got["swapped_tokens"] == len(drawn) - 1
    assert got["on_policy_tokens"] == batch.mask.sum() - len(drawn)


def test_same_state_and_batches_give_the_same_bits(
    config: DecoderConfig, params: Params, fresh: PolicyTrainer, batch: TrainBatch
) -> None:
    twin = PolicyTrainer(config, params, PLAIN)
    for _ in range(3):
        first, second = fresh.train(batch), twin.train(batch)
        assert first.metrics == second.metrics
        assert names(fresh) == names(twin)
    assert names(fresh)[0] != fingerprint(params)


@pytest.mark.parametrize("where", ["reward", "logprob NaN", "logprob -inf"])
def test_an_update_that_is_not_finite_changes_nothing_and_counts(
    fresh: PolicyTrainer, batch: TrainBatch, where: str
) -> None:
    fresh.train(batch)
    before, rate = names(fresh), fresh.updates
    reward, logprobs = batch.reward.copy(), batch.logprobs.copy()
    if where == "reward":
        reward[3] = np.inf
    else:
        logprobs[np.flatnonzero(batch.mask)[4]] = np.nan if where.endswith("NaN") else -np.inf
    report = fresh.train(replace(batch, reward=reward, logprobs=logprobs))
    assert report.skipped
    assert report.metrics["update_skipped"] == 1.0
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert (fresh.version, fresh.updates) == (2, rate)
    assert names(fresh) == before
    assert not fresh.train(batch).skipped
    assert names(fresh) != before


def test_what_stands_on_context_tokens_does_not_matter(fresh: PolicyTrainer, start: dict, batch: TrainBatch) -> None:
    fresh.train(batch)
    clean = names(fresh)
    fresh.load_state(start)
    dirty = np.where(batch.mask > 0, batch.logprobs, np.float32(np.nan))
    dirty[np.flatnonzero(batch.mask == 0)[::2]] = -np.inf
    fresh.train(replace(batch, logprobs=dirty))
    assert names(fresh) == clean


def test_samples_that_cannot_be_trained(fresh: PolicyTrainer, start: dict, batch: TrainBatch) -> None:
    """Too long, ids outside the vocabulary, nothing trained: told apart, and the others train as if alone."""
    fresh.train(batch)
    clean = fresh.state()["trainable"]
    fresh.load_state(start)
    bad = make_batch([([1] * 50, [2] * 15), ([1, 2], [29]), ([1, -1], [3]), ([4, 5], [])], [1.0, 1.0, 1.0, 1.0])
    joined = {name: np.concatenate([getattr(bad, name), getattr(batch, name)]) for name in vars(batch)}
    report = fresh.train(TrainBatch(**joined))
    assert report.fates == ["refused"] * 3 + ["masked"] + ["trained"] * 12
    assert report.metrics["samples_trained"] == 12
    for got, want in zip(jax.tree.leaves(fresh.trainable), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(got, want)


def test_zero_advantages_make_no_update(fresh: PolicyTrainer, batch: TrainBatch) -> None:
    before = names(fresh)
    report = fresh.train(replace(batch, reward=np.zeros(12, np.float32)))
    assert report.fates == ["zero_advantage"] * 12
    assert not report.skipped
    assert names(fresh) == before
    assert fresh.version == 1


def test_parameters_handed_out_stay_as_they_were(fresh: PolicyTrainer, batch: TrainBatch) -> None:
    held = fresh.policy_params()
    name, copy = fingerprint(held), jax.tree.map(np.array, held)
    for _ in range(3):
        fresh.train(batch)
    assert fingerprint(held) == name
    jax.tree.map(np.testing.assert_array_equal, held, copy)
    assert fingerprint(fresh.policy_params()) != name


def test_ratio_is_one_at_each_samples_temperature(config: DecoderConfig, params: Params, fresh: PolicyTrainer) -> None:
    mixed = standard_batch(config, params, temperature=[0.6, 1.0, 1.3] * 4)
    report = fresh.train(mixed)
    assert report.metrics["mismatch_max"] < NOISE
    assert report.metrics["is_weight_mean"] == pytest.approx(1.0, abs=1e-5)


def test_ratio_is_one_when_turns_of_a_sample_differ_in_temperature(
    config: DecoderConfig, params: Params, fresh: PolicyTrainer
) -> None:
    standard = standard_batch(config, params)
    turns = np.where(np.arange(len(standard.mask)) % 2, np.float32(0.5), np.float32(1.4))
    report = fresh.train(sampled_by(config, params, replace(standard, temperature=turns)))
    assert report.metrics["mismatch_max"] < NOISE
    assert report.metrics["is_weight_mean"] == pytest.approx(1.0, abs=1e-5)


def test_greedy_and_filtered_samples_are_compared_by_their_raw_logprobs(
    fresh: PolicyTrainer, batch: TrainBatch
) -> None:
    odd = np.repeat(np.array([True, False] * 6), batch.lengths)
    nonsense = replace(
        batch,
        filtered=odd.astype(np.uint8),
        temperature=np.where(odd, 0.0, 1.0).astype(np.float32),
        raw_logprobs=np.where(batch.mask > 0, batch.logprobs, np.nan).astype(np.float32),
        logprobs=np.where(odd, np.float32(np.nan), batch.logprobs),
    )
    report = fresh.train(nonsense)
    assert not report.skipped
    assert report.metrics["mismatch_max"] < NOISE
    assert report.metrics["on_policy_tokens"] == batch.mask.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_filtered_sample_is_corrected_whatever_its_temperature(batch: TrainBatch, temperature: float) -> None:
    whole = np.where(batch.mask > 0, np.float32(-2.0), np.nan).astype(np.float32)
    odd = replace(
        batch,
        filtered=np.ones_like(batch.mask),
        temperature=np.full(len(batch.mask), temperature, np.float32),
        raw_logprobs=whole,
    )
    np.testing.assert_array_equal(behaviour_logprobs(odd), whole)


def off_policy(batch: TrainBatch, shift: float) -> TrainBatch:
    """The sampler gave every trained token exp(shift) of the present probability."""
    return replace(batch, logprobs=np.where(batch.mask > 0, batch.logprobs + np.float32(shift), 0).astype(np.float32))


def test_truncated_correction_weighs_by_trainer_over_sampler_up_to_the_cap(
    fresh: PolicyTrainer, start: dict, batch: TrainBatch
) -> None:
    norms = {}
    for shift, weight in ((0.0, 1.0), (0.5, math.exp(-0.5)), (-0.5, math.exp(0.5)), (-3.0, 2.0)):
        fresh.load_state(start)
        got = fresh.train(off_policy(batch, shift)).metrics
        norms[shift] = got["grad_norm"]
        assert got["grad_norm"] == pytest.approx(norms[0.0] * weight, rel=1e-4)
        assert got["loss"] == pytest.approx(-weight * float(batch.reward.mean()), rel=1e-4)
        assert got["is_weight_mean"] == pytest.approx(weight, rel=1e-4)
        assert got["ratio_max"] == 1.0  # the clip is centred on the policy before the update


def test_without_correction_the_clip_is_centred_on_the_sampler(
    config: DecoderConfig, params: Params, batch: TrainBatch
) -> None:
    trainer = PolicyTrainer(config, params, replace(PLAIN, correction="none"))
    ratio = math.exp(0.5)
    got = trainer.train(off_policy(batch, -0.5)).metrics
    assert got["ratio_mean"] == pytest.approx(ratio, rel=1e-5)
    assert got["clip_fraction_high"] == 1.0
    assert got["clip_fraction_low"] == 0.0
    assert "is_weight_mean" not in got
    good = batch.reward > 0
    want = -(1.2 * batch.reward[good].sum() + ratio * batch.reward[~good].sum()) / 12
    assert got["loss"] == pytest.approx(float(want), rel=1e-4)


def test_epochs_and_minibatches(config: DecoderConfig, params: Params, batch: TrainBatch) -> None:
    settings = replace(PLAIN, epochs=2, minibatch_size=6, batch_size=12, total_steps=10, lr_schedule="linear")
    trainer = PolicyTrainer(config, params, settings)
    got = trainer.train(batch).metrics
    assert trainer.updates == 4
    assert trainer.version == 1
    assert got["num_tokens"] == batch.mask.sum()
    assert got["learning_rate"] == pytest.approx(1e-3 * (1 - 3 / 40))
    assert got["ratio_max"] > 1.001  # later updates stand against the policy before the first
    assert got["approx_kl"] > 0
    assert got["mismatch_max"] < NOISE  # of the weights that sampled, not of those between updates
    assert got["on_policy_tokens"] == batch.mask.sum()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_is_zero_at_the_start_model_and_grows(
    config: DecoderConfig, params: Params, batch: TrainBatch, estimator: str
) -> None:
    """All advantages 0: only the KL term acts, so nothing moves at the start, and a moved policy is pulled back."""
    preset = replace(PRESETS["bnpo"], kl_estimator=estimator)
    lora = LORA if estimator == "k2" else None
    trainer = PolicyTrainer(config, params, replace(PLAIN, beta=0.5, preset=preset, lora=lora, learning_rate=1e-2))
    still = replace(batch, reward=np.zeros(12, np.float32))
    first = trainer.train(still).metrics
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["loss"] == pytest.approx(0.0, abs=1e-6)
    for _ in range(3):
        trainer.train(batch)
    moved = logprobs_alone(config, trainer.policy_params(), batch) - logprobs_alone(config, params, batch)
    d = moved[batch.mask > 0].astype(np.float64)
    want = {"k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimator].mean()
    assert trainer.train(still).metrics["kl"] == pytest.approx(want, rel=1e-3, abs=1e-5)
    assert np.abs(d).max() > 1e-2


def test_lora_trains_the_adapter_alone(config: DecoderConfig, params: Params, batch: TrainBatch) -> None:
    base = fingerprint(params)
    trainer = PolicyTrainer(config, params, replace(PLAIN, lora=LORA, learning_rate=1e-2))
    assert fingerprint(trainer.policy_params()) == base  # a fresh adapter changes nothing
    start = trainer.state()["trainable"]
    got = trainer.train(batch).metrics
    assert got["mismatch_max"] < NOISE
    trainer.train(batch)
    assert fingerprint(params) == base
    for new, old in zip(jax.tree.leaves(trainer.trainable), jax.tree.leaves(start), strict=True):
        assert not np.array_equal(new, old)
    assert {name for layer in trainer.trainable["layers"] for name in layer} == {"qkv", "o", "gate_up", "down"}
    merged = merge(params, trainer.trainable, LORA.scale)
    for name in ("embed", "norm", "head"):
        np.testing.assert_array_equal(merged[name], params[name])
    by_adapter = trainer.score(batch)
    trained = batch.mask > 0
    np.testing.assert_allclose(by_adapter[trained], logprobs_alone(config, merged, batch)[trained], atol=NOISE)
    assert np.abs(by_adapter - batch.logprobs)[trained].max() > 1e-2


def test_save_load_train_equals_training_without_a_break(
    config: DecoderConfig, params: Params, fresh: PolicyTrainer, batch: TrainBatch
) -> None:
    fresh.train(batch)
    saved = fresh.state()
    trees = saved["trainable"], saved["optimizer_state"]
    kept = fingerprint(trees)
    fresh.train(batch)
    fresh.train(batch)
    assert fingerprint(trees) == kept  # the trainer goes on without touching it
    for _ in range(2):
        other = PolicyTrainer(config, params, PLAIN)
        other.load_state(saved)
        other.train(batch)
        other.train(batch)
        assert names(other) == names(fresh)
        assert (other.version, other.updates) == (fresh.version, fresh.updates) == (3, 3)
    assert fingerprint(trees) == kept


def test_a_state_of_another_form_is_refused(config: DecoderConfig, params: Params, fresh: PolicyTrainer) -> None:
    adapter = PolicyTrainer(config, params, replace(PLAIN, lora=LORA))
    before = names(fresh)
    with pytest.raises(TrainingError, match=r"state\['\w+'\].*has shape .* the trainer needs .*: build the trainer"):
        fresh.load_state(adapter.state())
    assert names(fresh) == before


def test_members_of_a_group_in_other_batches_count_in_its_statistics(config: DecoderConfig, params: Params) -> None:
    """Rewards 1 here and 0, 0.5 elsewhere: (1 − 0.5)/√(1/6). Alone the sample would have no advantage."""
    trainer = PolicyTrainer(config, params, PolicySettings(advantage="group", correction="none"))
    alone = make_batch([([3, 1], [5])], [1.0])
    peers = replace(alone, peer_reward=np.float32([0.0, 0.5]), peer_group=np.int32([0, 0]))
    assert trainer.train(alone).fates == ["zero_advantage"]
    report = trainer.train(
        replace(peers, logprobs=np.where(peers.mask > 0, np.nan, 0).astype(np.float32), filtered=peers.mask)
    )
    assert report.fates == ["trained"]
    assert report.metrics["loss"] == pytest.approx(-0.5 / math.sqrt(1 / 6), rel=1e-5)


def test_a_bandit_learns(config: DecoderConfig, params: Params) -> None:
    """Three prompts, one token each; only one token is rewarded. From p < 0.25 to p > 0.9 in 30 batches of 24."""
    settings = PolicySettings(learning_rate=0.03, advantage="group", preset=PRESETS["grpo"])
    trainer = PolicyTrainer(config, params, settings)
    prompts = [[3, 1], [3, 2], [3, 4]]
    rng = np.random.default_rng(0)

    def chances() -> np.ndarray:
        rows = np.zeros((3, 48), np.int32)
        rows[:, :2] = prompts
        logits = np.asarray(logits_of_rows(config, trainer.policy_params(), rows))[:, 1].astype(np.float64)
        p = np.exp(logits - logits.max(1, keepdims=True))
        return p / p.sum(1, keepdims=True)

    start = chances()
    rewarded = np.abs(start - 0.1).argmin(axis=1)  # likely enough to be met by chance
    for _ in range(30):
        p = chances()
        drawn = [(k, int(rng.choice(29, p=p[k]))) for k in range(3) for _ in range(8)]
        batch = make_batch(
            [(prompts[k], [token]) for k, token in drawn],
            [float(token == rewarded[k]) for k, token in drawn],
            group=[k for k, _ in drawn],
        )
        flat = np.array([math.log(p[k, token]) for k, token in drawn], np.float32)
        logprobs = batch.logprobs.copy()
        logprobs[batch.mask > 0] = flat
        report = trainer.train(
            replace(batch, logprobs=logprobs, versions=np.where(batch.mask > 0, trainer.version, -1))
        )
        assert report.metrics.get("mismatch_max", 0.0) < NOISE
    assert start[np.arange(3), rewarded].max() < 0.25
    assert chances()[np.arange(3), rewarded].min() > 0.9
