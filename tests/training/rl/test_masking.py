"""What may stand at masked places and in logits, and what must come of it: rows C01, C09, C11, C12, C18, C30, D06."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.rl import small, trainers
from tests.training.rl.small import MASK, RESPONSE, REWARDS, Policy, rollout, tokens
from tests.training.rl.trainers import ALL, assert_same, step_of
from upweight.training.rl import (
    GeneratedSequenceBatch,
    GroupRolloutBatch,
    GRPOConfig,
    GRPOTrainer,
    PreferenceBatch,
    REINFORCEConfig,
    REINFORCETrainer,
    SequenceRolloutBatch,
)


def poisoned(batch: Any, poison: float) -> Any:
    """The batch with `poison` at every masked place of every array of numbers, and ids far out of range there."""
    if isinstance(batch, GeneratedSequenceBatch):
        return _sequences(batch, poison)
    if isinstance(batch, PreferenceBatch):
        return PreferenceBatch(*(_sequences(half, poison) for half in (batch.chosen, batch.rejected)))
    if isinstance(batch, GroupRolloutBatch):
        return replace(batch, rollout=poisoned(batch.rollout, poison))
    names = ("old_log_probs", "advantages", "returns", "values", "sampler_log_probs")
    given = {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
    dirty = {name: np.where(MASK > 0, x, np.float32(poison)) for name, x in given.items()}
    return replace(batch, sequence_batch=_sequences(batch.sequence_batch, poison), **dirty)


def _sequences(batch: GeneratedSequenceBatch, poison: float) -> GeneratedSequenceBatch:
    """Ids are out of range behind the last trained token, where no model of the tests looks back from."""
    after = np.cumsum(RESPONSE[:, ::-1], axis=1)[:, ::-1] == 0
    bad = -3 if poison < 0 else 10_000
    ids = np.where(after, bad, np.asarray(batch.sequences)).astype(np.int32)
    return replace(batch, generation=replace(batch.generation, outputs=ids))


@pytest.mark.parametrize("kind", ALL)
def test_c11_masked_places_hold_anything(kind: str) -> None:
    options = {"grpo": {"is_cap": 1.5}, "ppo": {"value_clip": 0.2}}.get(kind, {})
    case = ALL[kind](**options)
    clean = step_of(case)
    for poison in (np.nan, np.inf, -np.inf, -1e4):
        metrics, after = step_of(ALL[kind](**options), poisoned(case.batch, poison))
        assert metrics == pytest.approx(clean[0], rel=1e-6)
        assert metrics["update_skipped"] == 0
        assert_same(after, clean[1], rtol=1e-6)


def test_c11_a_trained_id_out_of_range_skips_the_update() -> None:
    for bad in (99, -1):
        ids = tokens()
        ids[0, 4] = bad
        case = trainers.reinforce()
        before = small.params(case.trainer.model)
        metrics, after = step_of(case, rollout(rewards=REWARDS, sequences=ids))
        assert metrics["update_skipped"] == 1
        assert_same(before, after, 0, 0)


class Closed(Policy):
    """Token 10 can't be chosen: its logit is −inf."""

    def __call__(self, tokens: jax.Array) -> Any:
        out = super().__call__(tokens)
        logits = out[0] if isinstance(out, tuple) else out
        closed = logits.at[..., small.VOCAB - 1].set(-jnp.inf)
        return (closed, *out[1:]) if isinstance(out, tuple) else closed


@pytest.mark.parametrize("kind", ["reinforce", "ppo", "grpo"])
def test_c12_a_logit_of_minus_infinity(kind: str) -> None:
    """Entropy and exact KL are finite, and those of a vocabulary without the token."""
    ids = tokens() % (small.VOCAB - 1)
    more = {"reference": Closed(1)} if kind == "grpo" else {}
    case = ALL[kind](Closed(0, critic=kind == "ppo"), entropy_coeff=0.1, **more)
    sequences = GeneratedSequenceBatch.from_sequences(ids, response_mask=RESPONSE, rewards=REWARDS)
    batch = case.batch
    inner = batch.rollout if kind == "grpo" else batch
    inner = replace(inner, sequence_batch=sequences)
    metrics, after = step_of(case, replace(batch, rollout=inner) if kind == "grpo" else inner)
    assert metrics["update_skipped"] == 0
    assert all(np.isfinite(x).all() for x in after)
    logp = small.log_softmax(small.logits_of(small.arrays(Policy(0)), ids)[..., :-1])[:, :-1]
    assert metrics["entropy"] == pytest.approx(-((np.exp(logp) * logp).sum(-1) * MASK).sum() / 13, rel=1e-5)


@pytest.mark.parametrize(("prompt", "answer", "left"), [(2, 4, 0), (10, 3, 0), (3, 4, 2), (8, 6, 0)])
def test_c01_all_answer_tokens_get_the_return(prompt: int, answer: int, left: int) -> None:
    """A reward at the end reaches every token of the answer, wherever the answer stands."""
    length = 16
    ids = tokens(2, length)
    response = np.zeros((2, length), np.float32)
    response[:, left + prompt : left + prompt + answer] = 1
    config = REINFORCEConfig(gamma=0.5, normalize_returns=False, entropy_coeff=0.0)
    trainer = REINFORCETrainer(model := Policy(), small.optimizer(model), config)
    batch = GeneratedSequenceBatch.from_sequences(ids, response_mask=response, rewards=np.array([1.0, 3.0]))
    loss, _ = trainer.eval_step(SequenceRolloutBatch(batch))
    lp = small.log_probs_of(small.logits_of(small.arrays(model), ids), ids)[:, left + prompt - 1 :][:, :answer]
    returns = np.array([[1.0], [3.0]]) * 0.5 ** np.arange(answer)[::-1]
    assert float(loss) == pytest.approx(-(lp * returns).mean(), rel=1e-5)


def test_c09_prompts_are_not_trained_when_only_they_are_marked() -> None:
    prompt = np.zeros_like(RESPONSE)
    prompt[:, :3] = 1
    case = trainers.reinforce()
    by_prompt = case.trainer.eval_step(rollout(rewards=REWARDS, response_mask=None, prompt_mask=prompt))
    by_answer = case.trainer.eval_step(rollout(rewards=REWARDS, response_mask=1 - prompt))
    assert float(by_prompt[0]) == pytest.approx(float(by_answer[0]), rel=1e-6)
    assert float(by_prompt[1]["num_tokens"]) == 16


class Half(Policy):
    """Logits in bfloat16, as mixed precision makes them."""

    def __call__(self, tokens: jax.Array) -> Any:
        return (4 * super().__call__(tokens)).astype(jnp.bfloat16)


def test_c18_bfloat16_logits_are_cast_before_the_softmax() -> None:
    model = Half()
    exact = np.asarray(model(tokens()).astype(jnp.float32), np.float64)
    old = small.log_probs_of(exact, tokens()).astype(np.float32)
    case = trainers.grpo(model, beta=0.0)
    metrics, _ = step_of(case, small.grouped(old_log_probs=old))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_c30_integer_rewards_and_half_precision_numbers() -> None:
    whole = step_of(trainers.grpo(), small.grouped(old_log_probs=trainers.OLD, rewards=np.array([1, 0, 3, 7])))
    floats = step_of(trainers.grpo(), small.grouped(old_log_probs=trainers.OLD, rewards=np.array([1.0, 0.0, 3.0, 7.0])))
    assert whole[0] == floats[0]
    returns = trainers.reinforce().trainer.compute_returns(jnp.ones(4, jnp.bfloat16))
    assert returns.dtype == jnp.float32


def test_d06_long_answers_weigh_more_only_in_the_token_mean() -> None:
    """Lengths 1 and 4, advantages −1 and +1 at ratio 1: token mean −0.6, sequence mean 0."""
    response = np.zeros((2, 7), np.float32)
    response[0, 3], response[1, 3:] = 1, 1
    ids = tokens(2)
    model = Policy()
    old = small.log_probs_of(small.logits_of(small.arrays(model), ids), ids).astype(np.float32)
    for aggregation, expected in (("token_mean", -0.6), ("seq_mean_token_mean", 0.0), ("seq_mean_token_sum", -1.5)):
        config = GRPOConfig(num_generations=2, beta=0.0, entropy_coeff=0.0, loss_aggregation=aggregation)
        trainer = GRPOTrainer(model, small.optimizer(model), config)
        batch = rollout(sequences=ids, response_mask=response, rewards=np.array([0.0, 1.0]), old_log_probs=old)
        loss, _ = trainer.eval_step(GroupRolloutBatch(batch, 2))
        assert float(loss) == pytest.approx(expected, abs=1e-5)


def test_invalid_rows_stay_out_of_loss_and_group() -> None:
    """Two valid rows of a group of three have the advantages of a group of two; the third holds NaN."""
    valid = np.array([True, True, False])
    rewards = np.array([1.0, 3.0, np.nan], np.float32)
    model = Policy()
    trainer = GRPOTrainer(model, small.optimizer(model), GRPOConfig(num_generations=3, beta=0.0))
    three = rollout(
        sequences=tokens()[:3], response_mask=RESPONSE[:3], rewards=rewards, old_log_probs=trainers.OLD[:3], valid=valid
    )
    loss, metrics = trainer.eval_step(GroupRolloutBatch(three, 3))
    two = rollout(
        sequences=tokens()[:2], response_mask=RESPONSE[:2], rewards=rewards[:2], old_log_probs=trainers.OLD[:2]
    )
    twin = GRPOTrainer(model, small.optimizer(model), GRPOConfig(num_generations=2, beta=0.0))
    expected, also = twin.eval_step(GroupRolloutBatch(two, 2))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(metrics["advantages_std"]) == pytest.approx(float(also["advantages_std"]))


def widened(batch: Any, left: int, right: int) -> Any:
    """The batch with untrained tokens before and behind those of each row."""
    if isinstance(batch, PreferenceBatch):
        return PreferenceBatch(*(widened(half, left, right) for half in (batch.chosen, batch.rejected)))
    if isinstance(batch, GroupRolloutBatch):
        return replace(batch, rollout=widened(batch.rollout, left, right))

    def wide(x: Any) -> np.ndarray:
        return np.pad(np.asarray(x), ((0, 0), (left, right)))

    if isinstance(batch, GeneratedSequenceBatch):
        generation = replace(batch.generation, outputs=wide(batch.sequences))
        return replace(batch, generation=generation, response_mask=wide(batch.response_mask))
    names = ("old_log_probs", "advantages", "returns", "values", "sampler_log_probs")
    fields = {name: wide(x) for name in names if (x := getattr(batch, name)) is not None}
    return replace(batch, sequence_batch=widened(batch.sequence_batch, left, right), **fields)


@pytest.mark.parametrize("kind", ["ppo", "grpo", "dpo"])
def test_padding_side_and_row_order_do_not_matter(kind: str) -> None:
    """Rows turn about in whole groups and pairs."""
    more = {} if kind == "ppo" else {"reference": small.Bigram(1)}
    case = ALL[kind](small.Bigram(critic=kind == "ppo"), **more)
    start, results = case.trainer.state_dict(), []
    right, left = widened(case.batch, 0, 3), widened(case.batch, 3, 0)
    for batch in (right, left, jax.tree.map(lambda x: x[::-1], right)):
        case.trainer.load_state_dict(start)
        results.append(step_of(case, batch))
    for metrics, after in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-5, abs=1e-6)
        assert_same(after, results[0][1], rtol=1e-5, atol=1e-6)
