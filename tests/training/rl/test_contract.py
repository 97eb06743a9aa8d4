"""What trainers, adapters and functions refuse, warn of and accept: rows C02 … D09, T1, T10."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.rl import small, trainers
from tests.training.rl.small import MASK, RESPONSE, REWARDS, Policy, grouped, params, rollout, tokens
from tests.training.rl.trainers import OLD, OTHER, step_of
from upweight.errors import UpweightError
from upweight.training.rl import (
    ClippedReward,
    CompositeReward,
    ConstantReward,
    DPOConfig,
    DPOTrainer,
    GeneratedBatch,
    GeneratedSequenceBatch,
    GroupRolloutBatch,
    GRPOConfig,
    GRPOTrainer,
    PPOTrainer,
    PreferenceBatch,
    REINFORCEConfig,
    REINFORCETrainer,
    RewardModel,
    ScaledReward,
    SequencePolicyAdapter,
    SequenceRolloutBatch,
    SequenceValueHeadAdapter,
    ThresholdReward,
    as_reward_model,
    compute_clipped_surrogate_loss,
    compute_discounted_returns,
    compute_gae_advantages,
    compute_kl_divergence,
    compute_masked_clipped_surrogate_loss,
    compute_masked_kl_divergence,
    compute_masked_policy_entropy,
    compute_policy_entropy,
    normalize_advantages,
)
from upweight.training.rl.extraction import extract_logits_from_output, extract_values_from_output


def test_c02_c03_c26_group_normalisation() -> None:
    trainer = trainers.grpo().trainer
    third = 0.57735026
    np.testing.assert_allclose(
        trainer.normalize_group_rewards([0, 1, 1, 1], 4), [-1.7320508, third, third, third], rtol=1e-6
    )
    for reward in (0.7, 0.1):
        assert not np.asarray(trainer.normalize_group_rewards(np.full(8, reward, np.float32), 8)).any()
    with pytest.raises(ValueError, match="5 is not divisible into groups of 2"):
        trainer.normalize_group_rewards(np.ones(5), 2)
    sample = trainers.grpo(std_ddof=1).trainer.normalize_group_rewards(np.array([0, 1, 1, 1]), 4)
    np.testing.assert_allclose(sample, [-1.5, 0.5, 0.5, 0.5], rtol=1e-6)


def test_c02_a_group_without_variance_teaches_nothing_and_is_counted() -> None:
    case = trainers.grpo(beta=0.0, entropy_coeff=0.0)
    before = params(case.trainer.model)
    metrics, after = step_of(case, grouped(old_log_probs=OLD, rewards=np.full(4, 0.7)))
    assert metrics["zero_variance_groups"] == 2
    assert metrics["policy_loss"] == 0
    trainers.assert_same(before, after, 0, 0)


def test_c04_group_sizes_are_warned_of_once() -> None:
    model = Policy()
    trainer = GRPOTrainer(model, small.optimizer(model), GRPOConfig(beta=0.0))
    with pytest.warns(UserWarning, match="group_size is 2 and num_generations 4"):
        trainer.train_step(grouped(old_log_probs=OLD))
    trainer.train_step(grouped(old_log_probs=OLD))  # warnings are errors here: no second one
    alone = GRPOTrainer(model, small.optimizer(model), GRPOConfig(beta=0.0, entropy_coeff=0.0))
    before = params(model)
    with pytest.warns(UserWarning, match="group of one has advantage 0"):
        alone.train_step(grouped(1, old_log_probs=OLD))
    trainers.assert_same(before, params(model), 0, 0)


def test_c06_scores_are_sums() -> None:
    trainer = trainers.dpo().trainer
    lp = small.log_probs_of(small.logits_of(small.arrays(trainer.model), tokens()), tokens())
    for mask in (RESPONSE, MASK):
        scores = trainer.compute_log_probs(trainer.model, tokens(), mask)
        np.testing.assert_allclose(scores, (lp * MASK).sum(1), rtol=1e-5)
    np.testing.assert_allclose(trainer.compute_log_probs(trainer.policy_adapter, tokens()), lp.sum(1), rtol=1e-5)
    mean = trainers.dpo(length_normalized=True).trainer.compute_log_probs(trainer.model, tokens(), MASK)
    np.testing.assert_allclose(mean, (lp * MASK).sum(1) / MASK.sum(1), rtol=1e-5)
    batch = GeneratedSequenceBatch.from_sequences(tokens(), response_mask=RESPONSE)
    np.testing.assert_allclose(
        SequencePolicyAdapter(trainer.model).sequence_log_probs(batch), (lp * MASK).sum(1), rtol=1e-5
    )
    ref = small.log_probs_of(small.logits_of(small.arrays(trainer.reference_model), tokens()), tokens())
    for ratios in (trainer.compute_log_ratios(tokens(), MASK), trainer.compute_sequence_log_ratios(batch)):
        np.testing.assert_allclose(ratios, ((lp - ref) * MASK).sum(1), rtol=1e-4)


def test_c07_a_reference_is_needed_or_expressly_left_out() -> None:
    model = Policy()

    def make(**options: Any) -> DPOTrainer:
        adapter = options.pop("adapter", None)
        return DPOTrainer(model, None, small.optimizer(model), DPOConfig(**options), reference_adapter=adapter)

    with pytest.raises(ValueError, match="reference_model is None"):
        make()
    for options in ({"reference_free": True}, {"loss_type": "simpo"}, {"precomputed_reference": True}):
        make(**options)
    adapter = SequencePolicyAdapter(Policy(1))
    by_adapter = make(adapter=adapter).eval_step(trainers.pairs())
    by_model = trainers.dpo().trainer.eval_step(trainers.pairs())
    assert float(by_adapter[0]) == pytest.approx(float(by_model[0]), rel=1e-6)
    by_adapter = GRPOTrainer(
        model, small.optimizer(model), GRPOConfig(num_generations=2), reference_adapter=adapter
    ).eval_step(grouped(old_log_probs=OLD))
    by_model = trainers.grpo().trainer.eval_step(grouped(old_log_probs=OLD))
    assert float(by_adapter[1]["kl_penalty"]) == pytest.approx(float(by_model[1]["kl_penalty"]), rel=1e-5)
    assert float(by_model[1]["kl_penalty"]) > 0


def test_grpo_without_a_reference() -> None:
    """The batch's reference log-probs serve k3 for `exact`; without them the KL is 0, with one warning."""
    model = Policy()
    trainer = GRPOTrainer(model, small.optimizer(model), GRPOConfig(num_generations=2))
    d = small.log_probs_of(small.logits_of(small.arrays(model), tokens()), tokens()) - OTHER
    _, metrics = trainer.eval_step(grouped(old_log_probs=OLD, reference_log_probs=OTHER))
    assert float(metrics["kl_penalty"]) == pytest.approx(float(((np.exp(-d) - 1 + d) * MASK).sum() / 13), rel=1e-4)
    with pytest.warns(UserWarning, match="no reference model"):
        _, metrics = trainer.eval_step(grouped(old_log_probs=OLD))
    assert metrics["kl_penalty"] == 0
    trainer.eval_step(grouped(old_log_probs=OLD))


def test_c19_values_are_found_or_refused_by_name() -> None:
    logits, values = np.zeros((2, 5, 9), np.float32), np.ones((2, 5), np.float32)
    for output in ((logits, values), [logits, values[..., None]], {"value": values}, {"values": values, "logits": 0}):
        assert extract_values_from_output(output).shape[:2] == (2, 5)
    assert extract_values_from_output(SimpleNamespace(values=values)).shape == (2, 5)
    assert extract_values_from_output(nnx.Param(jnp.ones((2, 5)))).shape == (2, 5)
    cache = {"keys": np.zeros((2, 4, 5, 8))}
    for output, says in (
        ((logits, cache), r"array \(2, 5, 9\) float32, dict"),
        ((logits, np.ones((2, 5), np.int32)), "int32"),
        ((logits, np.ones((2, 4, 5, 8), np.float32)), r"\(2, 4, 5, 8\)"),
        ({"logits": logits}, "'logits'"),
        ((logits,), "tuple of array"),
        (logits, r"an array \(2, 5, 9\)"),
    ):
        with pytest.raises(TypeError, match=says):
            extract_values_from_output(output)


def test_logits_are_found_in_many_outputs() -> None:
    logits = np.zeros((2, 5, 9), np.float32)
    for output in (logits, (logits, 1), [[logits], 2], {"logits": logits}, SimpleNamespace(logits=logits)):
        found = extract_logits_from_output(output)
        assert isinstance(found, jax.Array)
        assert found.shape == (2, 5, 9)
    for output in ({"values": logits}, "text", [], SimpleNamespace(scores=logits)):
        with pytest.raises(TypeError, match="the model returned"):
            extract_logits_from_output(output)

    class Short(Policy):
        def __call__(self, tokens: jax.Array) -> Any:
            return super().__call__(tokens)[:, :-1]

    with pytest.raises(ValueError, match=r"logits has shape \(4, 6, 11\)"):
        trainers.reinforce(Short()).trainer.train_step(rollout(rewards=REWARDS))


def test_adapters() -> None:
    model, batch = Policy(critic=True), rollout(temperature=np.array([1.0, 2.0, 0.5, 1.0]))
    adapter = SequencePolicyAdapter(model, model_kwargs_factory=lambda batch: {}, logits_extractor=lambda out: out[0])
    heat = np.array([1.0, 2.0, 0.5, 1.0])[:, None, None]
    lp = small.log_probs_of(small.logits_of(small.arrays(model), tokens()) / heat, tokens())
    np.testing.assert_allclose(adapter.action_log_probs(batch), lp * MASK, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(jax.jit(adapter.action_log_probs)(batch), lp * MASK, rtol=1e-4, atol=1e-6)
    assert adapter.log_prob_distributions(batch).shape == (4, 6, small.VOCAB)
    bound = adapter.bind(Policy(1, critic=True))
    assert bound.model_kwargs_factory is adapter.model_kwargs_factory
    assert not np.allclose(bound.action_log_probs(batch), lp * MASK)
    values = SequenceValueHeadAdapter(model).action_values(batch)
    np.testing.assert_allclose(values, small.values_of(small.arrays(model), tokens()), rtol=1e-4, atol=1e-6)


class Frozen:
    """An adapter of someone else's, with a model and no `bind`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def action_log_probs(self, batch: Any) -> jax.Array:
        return SequencePolicyAdapter(self.model).action_log_probs(batch)

    def log_prob_distributions(self, batch: Any) -> jax.Array:
        return SequencePolicyAdapter(self.model).log_prob_distributions(batch)


def test_adapters_of_others() -> None:
    model, case = Policy(), trainers.grpo()
    config = GRPOConfig(num_generations=2)
    with pytest.raises(TypeError, match="Frozen holds another model"):
        GRPOTrainer(model, small.optimizer(model), config, policy_adapter=Frozen(Policy()))
    trainer = GRPOTrainer(
        model, small.optimizer(model), config, policy_adapter=Frozen(model), reference_adapter=Frozen(Policy(1))
    )
    metrics, after = step_of(trainers.Case(trainer, case.batch))
    expected = step_of(case)
    assert metrics == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    trainers.assert_same(after, expected[1], atol=1e-6)


def test_metrics_of_ratio_losses_and_c29() -> None:
    """Ratios 1.5 and 0.5 on one token each, 1 elsewhere."""
    case = trainers.grpo(beta=0.0)
    lp = small.log_probs_of(small.logits_of(small.arrays(case.trainer.model), tokens()), tokens())
    old = lp.copy()
    old[0, 2] -= np.log(1.5)
    old[0, 3] -= np.log(0.5)
    metrics, _ = step_of(case, grouped(old_log_probs=old.astype(np.float32)))
    assert metrics["ratio_max"] == pytest.approx(1.5, rel=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1.0, rel=1e-5)
    assert metrics["clip_fraction_low"] == pytest.approx(1 / 13)
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 13)
    assert metrics["approx_kl"] == pytest.approx((0.5 - np.log(1.5) + -0.5 - np.log(0.5)) / 13, rel=1e-3)
    added = {"grad_norm", "update_skipped", "num_tokens", "response_length_mean"}
    ratio = {"approx_kl", "clip_fraction_low", "clip_fraction_high", "ratio_mean", "ratio_max"}
    for kind, own in (
        ("reinforce", set()),
        ("ppo", {*ratio, "explained_variance"}),
        ("grpo", {*ratio, "zero_variance_groups"}),
        ("dpo", {"rewards_chosen", "rewards_rejected", "total_loss"}),
    ):
        metrics, _ = step_of(trainers.ALL[kind]())
        assert added | own <= metrics.keys()
        assert not any(name.startswith("_") for name in metrics)
        assert np.isfinite(list(metrics.values())).all()
    flat = replace(trainers.batch_for("ppo"), returns=np.ones((4, 6), np.float32))
    assert "explained_variance" not in step_of(trainers.ppo(), flat)[0]


def test_d03_advantages_are_used_and_token_rewards_warned_of() -> None:
    case = trainers.grpo(beta=0.0, entropy_coeff=0.0)
    old = small.log_probs_of(small.logits_of(small.arrays(case.trainer.model), tokens()), tokens())
    loss, _ = case.trainer.eval_step(grouped(old_log_probs=old.astype(np.float32), advantages=OTHER))
    assert float(loss) == pytest.approx(float(-(OTHER * MASK).sum() / 13), rel=1e-4)
    fresh = GRPOTrainer(model := Policy(), small.optimizer(model), GRPOConfig(num_generations=2, beta=0.0))
    with pytest.warns(UserWarning, match="token_rewards are not used"):
        fresh.train_step(grouped(old_log_probs=OLD, token_rewards=MASK))
    fresh.train_step(grouped(old_log_probs=OLD, token_rewards=MASK))


def test_d07_legacy_mappings() -> None:
    ids = {"chosen": tokens(), "rejected": tokens(seed=3)[:, :5]}
    masks = {"chosen_loss_mask": RESPONSE, "rejected_loss_mask": MASK[:, :4]}
    trainer = trainers.dpo(reference_free=True).trainer
    loss, _ = trainer.eval_step({**ids, **masks})
    make = GeneratedSequenceBatch.from_sequences
    typed = PreferenceBatch(
        make(ids["chosen"], response_mask=RESPONSE), make(ids["rejected"], response_mask=RESPONSE[:, :5])
    )
    assert float(loss) == pytest.approx(float(trainer.eval_step(typed)[0]), rel=1e-5)
    attention = {"chosen_attention_mask": np.ones((4, 7)), "rejected_attention_mask": np.ones((4, 5))}
    with pytest.warns(UserWarning, match="chosen_attention_mask and rejected_attention_mask used as loss masks"):
        trainer.eval_step({**ids, **attention})
    trainer.eval_step({**ids, **attention})
    nothing = RESPONSE.copy()
    nothing[2] = 0
    with pytest.raises(ValueError, match="chosen row 2 has no scored token"):
        trainer.train_step({**ids, **masks, "chosen_loss_mask": nothing})
    with pytest.raises(KeyError, match="no 'rejected'"):
        trainer.train_step({"chosen": tokens()})
    with pytest.raises(ValueError, match="same batch size"):
        trainer.train_step({"chosen": tokens(), "rejected": tokens()[:2]})


def test_d09_what_is_refused_and_what_is_converted() -> None:
    reinforce, grpo = trainers.reinforce().trainer, trainers.grpo().trainer
    for refused, error, says in (
        (lambda: rollout(rewards=REWARDS[:, None]), ValueError, "rewards has shape"),
        (lambda: reinforce.train_step(rollout()), ValueError, "no returns, no token_rewards and no sequence rewards"),
        (lambda: reinforce.train_step(rollout(sequences=tokens() * 1.0, rewards=REWARDS)), TypeError, "integer"),
        (lambda: reinforce.train_step(tokens()), TypeError, "REINFORCETrainer got a ndarray"),
        (
            lambda: reinforce.train_step(rollout(rewards=REWARDS), num_microbatches=0),
            ValueError,
            "num_microbatches is 0",
        ),
        (lambda: reinforce.train_step_accumulated([]), ValueError, "batches is empty"),
        (lambda: reinforce.compute_returns(np.ones((1, 1, 1))), ValueError, "one or two dimensions"),
        (lambda: grpo.train_step(rollout(rewards=REWARDS)), TypeError, "wrap the rollout"),
        (lambda: grpo.train_step(grouped()), ValueError, "no old_log_probs"),
        (lambda: grpo.train_step(GroupRolloutBatch(rollout(old_log_probs=OLD), 2)), ValueError, "no sequence rewards"),
        (lambda: trainers.ppo().trainer.train_step(rollout(rewards=REWARDS)), ValueError, "no old_log_probs"),
        (
            lambda: trainers.ppo().trainer.train_step(rollout(old_log_probs=OLD)),
            ValueError,
            "no returns and no advantages",
        ),
        (lambda: trainers.dpo().trainer.train_step(PreferenceBatch(rollout(), rollout())), TypeError, "DPOTrainer got"),
        (lambda: CompositeReward([]), ValueError, "reward_fns is empty"),
        (lambda: CompositeReward([ConstantReward()], [1.0, 2.0]), ValueError, "weights has 2 entries"),
        (lambda: GRPOTrainer(Policy(), None, GRPOConfig.preset("dr_grpo")), ValueError, "max_response_length is None"),
    ):
        with pytest.raises(error, match=says) as caught:
            refused()
        assert isinstance(caught.value, UpweightError)
    listed = rollout(sequences=tokens().tolist(), response_mask=RESPONSE.tolist(), rewards=[1, 0, 0.5, 2])
    assert float(reinforce.eval_step(listed)[0]) == float(reinforce.eval_step(rollout(rewards=REWARDS))[0])


def test_t1_log_probs_of_the_generation_serve() -> None:
    inner = GeneratedSequenceBatch.from_sequences(tokens(), response_mask=RESPONSE, rewards=REWARDS, old_log_probs=OLD)
    got = trainers.grpo().trainer.eval_step(GroupRolloutBatch(SequenceRolloutBatch(inner), 2))
    assert float(got[0]) == float(trainers.grpo().trainer.eval_step(grouped(old_log_probs=OLD))[0])


def test_configs_are_checked_again_when_a_trainer_is_built() -> None:
    config = REINFORCEConfig()
    config.gamma = 5
    with pytest.raises(ValueError, match="gamma is 5"):
        REINFORCETrainer(Policy(), None, config)


def test_functions_and_ppo_helpers() -> None:
    np.testing.assert_allclose(compute_discounted_returns([1, 1, 1], 0.5), [1.75, 1.5, 1.0])
    ppo = trainers.ppo(gamma=0.5, gae_lambda=1.0).trainer
    ones, values = np.ones(3), np.array([0.5, 0.5, 0.5, 2.0])
    with_end = [1.75 + 0.25 - 0.5, 1.5 + 0.5 - 0.5, 1.0 + 1.0 - 0.5]
    np.testing.assert_allclose(compute_gae_advantages(ones, values, 0 * ones, 0.5, 1.0), with_end)
    np.testing.assert_allclose(ppo.compute_gae(ones, values, None), with_end)
    np.testing.assert_allclose(ppo.compute_gae(ones[None], values[None, :3], None), [[1.25, 1.0, 0.5]])
    with pytest.raises(ValueError, match="values has 2 entries"):
        compute_gae_advantages(ones, values[:2], None, 0.5, 1.0)
    p, q = (
        np.log(np.array([[0.5, 0.5, 0.0]]) + 0.0, where=[[1, 1, 0]], out=np.full((1, 3), -np.inf)),
        np.log([[0.25, 0.5, 0.25]]),
    )
    assert float(compute_policy_entropy(p)) == pytest.approx(np.log(2), rel=1e-6)
    assert float(compute_kl_divergence(p, q)) == pytest.approx(0.5 * np.log(2), rel=1e-6)
    two_p, two_q, mask = np.stack([p, p * np.nan]), np.stack([q, q * np.nan]), np.array([[1], [0]])
    assert float(compute_masked_policy_entropy(two_p, mask)) == pytest.approx(np.log(2), rel=1e-6)
    assert float(compute_masked_kl_divergence(two_p, two_q, mask)) == pytest.approx(0.5 * np.log(2), rel=1e-6)
    lp, adv = np.log([1.5, 0.5, 1.0]), np.array([1.0, -1.0, 2.0])
    assert float(compute_clipped_surrogate_loss(lp, 0 * lp, adv, 0.2)) == pytest.approx(-(1.2 - 0.8 + 2) / 3)
    masked = compute_masked_clipped_surrogate_loss(lp, 0 * lp, adv, np.array([1, 1, 0]), 0.2)
    assert float(masked) == pytest.approx(-0.2, rel=1e-5)
    assert float(ppo.compute_clipped_loss(lp, 0 * lp, adv)) == pytest.approx(-0.8)
    assert float(ppo.compute_value_loss([1.0, 2.0], [0.0, 4.0])) == 2.5
    assert float(ppo.compute_value_loss([1.0, 2.0], [0.0, np.nan], np.array([1, 0]))) == 1.0
    assert float(ppo.compute_entropy(p)) == pytest.approx(np.log(2), rel=1e-6)
    np.testing.assert_allclose(normalize_advantages([1, 2, 3]), [-1.2247449, 0, 1.2247449], rtol=1e-6)
    np.testing.assert_allclose(trainers.reinforce().trainer.normalize_returns([1, 3]), [-1, 1], rtol=1e-6)


def test_rewards_and_t10() -> None:
    samples = np.array([[1, 2], [3, 4]])

    def total(samples: Any, conditions: Any = None, **_: Any) -> Any:
        return samples.sum(axis=1) + (0 if conditions is None else conditions)

    assert ConstantReward(2.0)(samples).tolist() == [2, 2]
    assert CompositeReward([ConstantReward(), total])(samples).tolist() == [2, 4]
    assert CompositeReward([ConstantReward(), total], [1, 0.5])(samples, np.array([1, 1])).tolist() == [3, 5]
    assert ThresholdReward(total, 3)(samples).tolist() == [0, 1]
    assert ThresholdReward(total, 7, above=False)(samples).tolist() == [1, 0]
    assert ScaledReward(total, 0.5, 1)(samples).tolist() == [2.5, 4.5]
    assert ClippedReward(total, 4, 5)(samples).tolist() == [4, 5]
    model = as_reward_model(total)
    assert isinstance(model, RewardModel)
    batch = GeneratedBatch(samples, conditioning=np.array([1, 2]))
    assert model.score_generations(batch).tolist() == [4, 9]

    class Judge:
        def score_generations(self, batch: GeneratedBatch) -> Any:
            return [float(x) for x in batch.outputs[:, 0]]

    assert CompositeReward([as_reward_model(Judge()), total])(samples).tolist() == [2, 5]
    with pytest.raises(ValueError, match="one reward a sample"):
        as_reward_model(lambda samples, conditions: samples)(samples)


def test_nothing_else_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in trainers.ALL.values():
            step_of(make())
    assert isinstance(trainers.ppo().trainer, PPOTrainer)
