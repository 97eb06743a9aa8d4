"""Options that are off by default, models of several kinds, and loss functions in transformations of one's own."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.training.rl import small, trainers
from tests.training.rl.small import MASK, REWARDS, HeadPolicy, Policy, grouped
from tests.training.rl.trainers import OLD, OTHER, assert_same, step_of
from upweight.models.config import DecoderConfig
from upweight.models.decoder import Decoder
from upweight.models.layers import Params
from upweight.training.rl import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SequencePolicyAdapter

ADVANTAGES = np.array([1.0, -1.0, -1.0, 1.0])[:, None] * MASK  # of REWARDS in groups of two
PLAIN = {"beta": 0.0, "entropy_coeff": 0.0}


def own_log_probs(model: Policy) -> np.ndarray:
    return small.log_probs_of(small.logits_of(small.arrays(model), small.tokens()), small.tokens())


def clipped(ratio: np.ndarray, mask: np.ndarray = MASK, weight: Any = 1.0) -> float:
    loss = -np.minimum(ratio * ADVANTAGES, np.clip(ratio, 0.8, 1.2) * ADVANTAGES) * weight
    return float((loss * mask).sum() / mask.sum())


def test_tokens_outside_the_band_leave_numerator_and_denominator() -> None:
    case = trainers.grpo(**PLAIN, is_mask=(0.8, 1.25))
    sampler = OLD - 0.5 * np.sin(2 * np.arange(24.0)).reshape(4, 6).astype(np.float32)
    batch = grouped(old_log_probs=OLD, sampler_log_probs=sampler)
    off = np.exp(OLD - sampler)
    kept = MASK * (off >= 0.8) * (off <= 1.25)
    assert 0 < kept.sum() < MASK.sum()
    ratio = np.exp(own_log_probs(case.trainer.model) - OLD)
    loss, metrics = case.trainer.eval_step(batch)
    assert float(loss) == pytest.approx(clipped(ratio, kept), rel=1e-4)
    assert float(metrics["num_tokens"]) == kept.sum()
    rows = trainers.grpo(**PLAIN, is_mask=(0.9, 1.1), is_mask_level="sequence").trainer
    mean = np.exp(((OLD - sampler) * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True))
    kept = MASK * (mean >= 0.9) * (mean <= 1.1)
    assert 0 < kept.sum() < MASK.sum()
    assert float(rows.eval_step(batch)[0]) == pytest.approx(clipped(ratio, kept), rel=1e-4)


def test_decoupled_ppo_clips_around_the_policy_before_the_update() -> None:
    """The ratio is 1 in value; tokens weigh π/π_sampler, capped if asked; the band may be about it as well."""
    lp = own_log_probs(Policy())
    off = np.exp(lp - OLD)
    for cap, weight in ((None, off), (1.1, np.minimum(off, 1.1))):
        case = trainers.grpo(**PLAIN, proximal="recomputed", is_cap=cap)
        loss, metrics = case.trainer.eval_step(grouped(old_log_probs=OLD))
        assert float(loss) == pytest.approx(clipped(np.ones_like(lp), weight=weight), rel=1e-4)
        assert float(metrics["ratio_max"]) == pytest.approx(1.0)
        assert float(metrics["is_weight_mean"]) == pytest.approx(float((weight * MASK).sum() / 13), rel=1e-4)
    band = trainers.grpo(**PLAIN, proximal="recomputed", is_mask=(0.9, 1.2)).trainer
    kept = MASK * (off >= 0.9) * (off <= 1.2)
    expected = clipped(np.ones_like(lp), kept, off)
    assert float(band.eval_step(grouped(old_log_probs=OLD))[0]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("size", [None, 2])
def test_decoupled_ppo_clips_in_later_updates(size: int | None) -> None:
    """The centre is the policy before the first update, for all of them; against plain gradient descent in float64."""
    rate, model = 2.0, Policy()
    start = small.arrays(model)

    def log_probs(p: small.Arrays) -> np.ndarray:
        return small.log_probs_of(small.logits_of(p, small.tokens()), small.tokens())

    old, now, updates = log_probs(start), start, []
    weight = np.exp(old - OLD)
    for rows in 2 * ([slice(0, 4)] if size is None else [slice(0, 2), slice(2, 4)]):
        part = np.zeros((4, 1))
        part[rows] = 1

        def loss(p: small.Arrays, part: np.ndarray = part) -> float:
            return clipped(np.exp(log_probs(p) - old), MASK * part, weight)

        ratio, kept = np.exp(log_probs(now) - old), (MASK * part) > 0
        outside = ((ratio < 0.8)[kept].mean(), (ratio > 1.2)[kept].mean())
        updates.append((loss(now), ratio[kept].mean(), ratio[kept].max(), *outside))
        slopes = small.slopes(loss, now)
        now = {name: x - rate * slopes[name] for name, x in now.items()}
    config = GRPOConfig(num_generations=2, proximal="recomputed", **PLAIN)
    trainer = GRPOTrainer(model, small.optimizer(model, rate), config)
    got, metrics = trainer.update(grouped(old_log_probs=OLD), epochs=2, minibatch_size=size)
    losses, mean, top, low, high = np.array(updates).T
    assert top.max() > 1.2
    assert low.max() > 0
    assert float(got) == pytest.approx(losses.mean(), rel=1e-4)
    found = [float(metrics[name]) for name in ("ratio_mean", "ratio_max", "clip_fraction_low", "clip_fraction_high")]
    assert found == pytest.approx([mean.mean(), top.max(), low.mean(), high.mean()], rel=1e-4)
    after = small.arrays(model)
    for name, want in now.items():
        np.testing.assert_allclose(after[name], want, rtol=1e-3, atol=1e-4, err_msg=name)
    with pytest.raises(ValueError, match="minibatch_size is 3; it must be a multiple of group_size 2"):
        trainer.update(grouped(old_log_probs=OLD), minibatch_size=3)


def test_flat_groups_leave_numerator_and_denominator() -> None:
    """Rows of the first group have equal rewards; the means, that of the entropy among them, are over the other's tokens."""
    rewards = np.array([0.7, 0.7, 0.5, 2.0], np.float32)
    batch = grouped(old_log_probs=OLD, rewards=rewards)
    trainer = trainers.grpo(**PLAIN | {"entropy_coeff": 0.3}, filter_flat_groups=True).trainer
    alone = trainers.grpo(**PLAIN | {"entropy_coeff": 0.3}).trainer
    loss, metrics = trainer.eval_step(batch)
    second = jax.tree.map(lambda x: x[2:], batch.rollout)
    expected, of_second = alone.eval_step(replace(batch, rollout=second))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(metrics["entropy"]) == pytest.approx(float(of_second["entropy"]), rel=1e-5)
    assert float(metrics["num_tokens"]) == MASK[2:].sum()
    assert float(metrics["zero_variance_groups"]) == 1
    assert float(alone.eval_step(batch)[1]["num_tokens"]) == MASK.sum()
    before = small.params(trainer.model)
    metrics, after = step_of(
        trainers.Case(trainer, batch), grouped(old_log_probs=OLD, rewards=np.full(4, 0.7, np.float32))
    )
    assert metrics["update_skipped"] == 1
    assert_same(before, after, 0, 0)
    assert GRPOConfig.preset("dapo").filter_flat_groups


def test_overlong_answers() -> None:
    """Answers have 4, 2, 3 and 4 tokens."""
    lp = own_log_probs(Policy())
    masked = trainers.grpo(**PLAIN, overlong="mask", overlong_length=4).trainer
    loss, metrics = masked.eval_step(grouped(old_log_probs=OLD))
    short = MASK * np.array([0, 1, 1, 0])[:, None]
    assert float(loss) == pytest.approx(clipped(np.exp(lp - OLD), short), rel=1e-4)
    assert float(metrics["num_tokens"]) == 5
    soft = trainers.grpo(**PLAIN, overlong="soft", overlong_length=4, overlong_buffer=2, scale_rewards="none").trainer
    punished = REWARDS - np.array([1.0, 0.0, 0.5, 1.0], np.float32)
    by_hand = trainers.grpo(**PLAIN, scale_rewards="none").trainer
    expected = by_hand.eval_step(grouped(old_log_probs=OLD, rewards=punished))
    got = soft.eval_step(grouped(old_log_probs=OLD))
    assert float(got[0]) == pytest.approx(float(expected[0]), rel=1e-5)


class HeadWithoutValueHead(HeadPolicy):
    """Values stand only in the output of a call."""

    value_head = None  # type: ignore[assignment]
    calls: list[int] = []  # noqa: RUF012 - shared by the copies that are traced

    def __call__(self, tokens: jax.Array) -> Any:
        self.calls.append(1)
        return Policy.__call__(self, tokens)


def test_one_call_serves_logits_and_values_where_there_is_no_value_head() -> None:
    model = HeadWithoutValueHead(critic=True)
    trainer = PPOTrainer(model, small.optimizer(model), PPOConfig())
    metrics, after = step_of(trainers.Case(trainer, trainers.batch_for("ppo")))
    assert model.calls == [1]
    expected = step_of(trainers.ppo())
    assert metrics == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert_same(after, expected[1], atol=1e-6)


def test_only_what_the_optimizer_trains_is_changed() -> None:
    """As with an adapter: the other parameters keep their very arrays."""
    model = Policy()
    only = nnx.All(nnx.Param, nnx.PathContains("out"))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=only)
    trainer = GRPOTrainer(model, optimizer, GRPOConfig(num_generations=2), reference_model=Policy(1))
    mix, out = model.mix.kernel[...], np.asarray(model.out.kernel[...]).copy()
    metrics, _ = step_of(trainers.Case(trainer, trainers.batch_for("grpo")))
    assert model.mix.kernel[...] is mix
    assert np.abs(np.asarray(model.out.kernel[...]) - out).max() > 0
    whole = step_of(trainers.grpo())[0]
    assert metrics["total_loss"] == pytest.approx(whole["total_loss"], rel=1e-5)
    assert metrics["grad_norm"] < whole["grad_norm"]


@pytest.mark.parametrize("kind", trainers.ALL)
def test_batches_and_models_may_be_closed_over(kind: str) -> None:
    case = trainers.ALL[kind]()
    loss_fn, model, batch = case.trainer.create_loss_fn(), case.trainer.model, case.batch
    loss = float(case.trainer.eval_step(batch)[0])
    by_closure, grads = nnx.jit(nnx.value_and_grad(lambda model: loss_fn(model, batch)[0]))(model)
    assert float(by_closure) == pytest.approx(loss, rel=1e-5)
    assert len(jax.tree.leaves(grads)) == len(small.params(model))
    assert float(jax.jit(lambda batch: loss_fn(model, batch)[0])(batch)) == pytest.approx(loss, rel=1e-5)


class Plain(nnx.Module):
    """Our decoder behind the plain contract."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.decoder(tokens)


def test_our_decoder_trains_by_either_contract(config: DecoderConfig, params: Params) -> None:
    results = []
    for wrap in (lambda decoder: decoder, Plain):
        model, reference = (wrap(Decoder(config, jax.tree.map(lambda x, k=k: k * x, params))) for k in (1.0, 0.9))
        trainer = GRPOTrainer(model, small.optimizer(model), GRPOConfig(num_generations=2), reference_model=reference)
        old = jax.jit(SequencePolicyAdapter(model).action_log_probs)(small.rollout())
        metrics, after = step_of(trainers.Case(trainer, grouped(old_log_probs=old + 0.1 * jnp.asarray(OTHER))))
        assert metrics["update_skipped"] == 0
        results.append((metrics, after))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4, abs=1e-6)
    assert_same(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


def test_keyword_arguments_of_a_factory_see_unpadded_batches() -> None:
    """A factory may make arrays of the batch's own shape, so such batches are not padded."""

    class Offset(Policy):
        def __call__(self, tokens: jax.Array, offset: jax.Array) -> Any:  # type: ignore[override]
            return super().__call__(tokens) + offset[:, :, None]

    model = Offset()
    adapter = SequencePolicyAdapter(
        model, model_kwargs_factory=lambda batch: {"offset": batch.sequence_batch.conditioning["offset"]}
    )
    trainer = GRPOTrainer(
        model, small.optimizer(model), GRPOConfig(num_generations=2, beta=0.0), policy_adapter=adapter
    )
    expected = float(trainers.grpo(beta=0.0).trainer.eval_step(grouped(old_log_probs=OLD))[0])
    trainer._shapes.first = (1, 5)
    batch = grouped(old_log_probs=OLD)
    inner = batch.rollout.sequence_batch
    generation = replace(inner.generation, conditioning={"offset": jnp.ones((4, 7))})
    with_offset = replace(batch, rollout=replace(batch.rollout, sequence_batch=replace(inner, generation=generation)))
    assert float(trainer.eval_step(with_offset)[0]) == pytest.approx(
        expected, rel=1e-5
    )  # an offset of all logits is none


def test_given_advantages_are_taken_as_they_are() -> None:
    """Also where a method would whiten its own."""
    model = Policy()
    trainer = GRPOTrainer(model, small.optimizer(model), GRPOConfig.preset("reinforce_pp", num_generations=2))
    old = own_log_probs(model).astype(np.float32)
    loss, _ = trainer.eval_step(grouped(old_log_probs=old, advantages=OTHER))
    assert float(loss) == pytest.approx(float(-(OTHER * MASK).sum() / 13), rel=1e-4)


@pytest.mark.parametrize("kind", ["reinforce", "ppo", "grpo"])
def test_a_batch_with_nothing_to_train_moves_nothing(kind: str) -> None:
    """Nor does decay or momentum; and means over no token are not told."""
    case = trainers.ALL[kind](Policy(critic=kind == "ppo"))
    model = case.trainer.model
    case.trainer.optimizer = nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.5), wrt=nnx.Param)
    nothing = np.zeros(small.ROWS, bool)
    if kind == "grpo":
        batch = replace(case.batch, rollout=replace(case.batch.rollout, valid=nothing))
    else:
        batch = replace(case.batch, valid=nothing)
    before = small.params(model)
    ways = [case.trainer.train_step] + ([case.trainer.update] if kind == "ppo" else [])
    for way in ways:
        _, metrics = way(batch)
        assert (metrics["num_tokens"], metrics["update_skipped"]) == (0, 1)
        assert all(np.isfinite(x) for x in metrics.values())
        absent = {"ratio_mean", "ratio_max", "approx_kl", "clip_fraction_low", "response_length_mean"}
        assert not absent & metrics.keys()
        assert_same(small.params(model), before, 0, 0)
        assert int(case.trainer.optimizer.step[...]) == 0


def test_a_minibatch_with_nothing_to_train_makes_no_update() -> None:
    case = trainers.ppo()
    half = replace(case.batch, valid=np.array([True, True, False, False]))
    metrics = case.trainer.update(half, minibatch_size=2)[1]
    assert metrics["update_skipped"] == 0
    assert metrics["ratio_mean"] > 0.7  # not halved


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"is_cap": 2.0}, "is_cap has no effect: the batch has no sampler_log_probs"),
        ({"is_mask": (0.5, 2.0)}, "is_mask has no effect: the batch has no sampler_log_probs"),
        ({"kl_coeff": 0.1}, "kl_coeff has no effect without kl_in_reward"),
        ({"policy_loss": "cispo", "dual_clip": 3.0}, "dual_clip has no effect: policy_loss 'cispo' has none"),
        ({"policy_loss": "cispo", "ratio_level": "sequence"}, "ratio_level has no effect with policy_loss 'cispo'"),
    ],
)
def test_grpo_options_without_effect_are_warned_of_once(config: dict[str, Any], message: str) -> None:
    settings = GRPOConfig(num_generations=2, **PLAIN, **config)
    trainer = GRPOTrainer(model := Policy(), small.optimizer(model), settings)
    with pytest.warns(UserWarning, match=message):
        trainer._checked(grouped(old_log_probs=OLD))
    trainer._checked(grouped(old_log_probs=OLD))


def test_a_value_clip_without_old_values_is_warned_of_once() -> None:
    trainer = PPOTrainer(model := Policy(critic=True), small.optimizer(model), PPOConfig(value_clip=0.2))
    batch = replace(trainers.batch_for("ppo"), values=None)
    with pytest.warns(UserWarning, match="value_clip has no effect: the batch has no values"):
        trainer._checked(batch)
    trainer._checked(batch)
    PPOTrainer(model, small.optimizer(model), PPOConfig(value_clip=0.2))._checked(trainers.batch_for("ppo"))


def test_cispo_reports_no_clipped_share() -> None:
    metrics = trainers.grpo(**PLAIN, policy_loss="cispo").trainer.eval_step(grouped(old_log_probs=OLD))[1]
    assert "ratio_max" in metrics
    assert not any(name.startswith("clip_fraction") for name in metrics)
