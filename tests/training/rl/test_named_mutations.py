"""The rules that the reference got wrong, or that only a batch of a certain form can tell: taken out, each is missed by a test.

A mutation's name says what is altered; its check drives a trainer, or the public function that has the rule.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.training import test_gradients
from tests.training.rl import small, test_contract, test_masking, test_math, test_options, test_steps, trainers
from tests.training.rl.test_mutations import mutated
from upweight.ops import advantages, corrections, grouped_advantages, logprobs, masked_stats
from upweight.training import gradients
from upweight.training.rl import (
    compiled,
    grpo_advantages,
    inputs,
    masked_normalize,
    normalize_advantages,
    pairs,
    rollouts,
    scoring,
)


class Mutation(NamedTuple):
    name: str
    module: ModuleType
    old: str
    new: str
    check: Callable[[], None]
    tier: str = ""  # the default one, or the mark of a later one


def a_constant_is_whitened_to_nothing() -> None:
    x = np.full(7, 0.1, np.float32)
    assert not np.asarray(normalize_advantages(x)).any()
    assert not np.asarray(masked_normalize(x, np.ones(7))).any()


def prompts_are_not_answers() -> None:
    batch = small.rollout(response_mask=None, prompt_mask=1 - small.RESPONSE)
    np.testing.assert_array_equal(batch.action_mask, small.MASK)


def groups() -> None:
    test_contract.test_c02_c03_c26_group_normalisation()


MUTATIONS = [
    Mutation("C02 flat groups are divided by a std of nothing", advantages, "high - low <= 1e-6", "high - low < 0", groups),
    Mutation("C02 flat groups are not counted", grouped_advantages, "(flat & (count >= 1))", "(flat & (count < 1))", test_contract.test_c02_a_group_without_variance_teaches_nothing_and_is_counted, "ci"),
    Mutation("C03 always the population std", grouped_advantages, "count - ddof", "count", groups),
    Mutation("C03 always the sample std", grouped_advantages, "count - ddof", "count - 1", groups),
    Mutation("C24 constants are whitened as others", masked_stats, "flat = high - low <= FLAT * jnp.abs(mean)", "flat = high < low", a_constant_is_whitened_to_nothing),
    Mutation("C09 all but a response mask is trained", rollouts, "mask = batch.prompt_mask == 0", "mask = jnp.ones(batch.sequences.shape, bool)", prompts_are_not_answers),
    Mutation("C09 the prompt is trained and not the answer", rollouts, "batch.prompt_mask == 0", "batch.prompt_mask != 0", test_masking.test_c09_prompts_are_not_trained_when_only_they_are_marked, "ci"),
    Mutation("D10 micro-batches divide by their own tokens", inputs, "rule.count(totals.tokens,", "rule.count(jnp.sum(places.trained),", lambda: split("reinforce", "token_mean")),
    Mutation("D10 micro-batches divide by their own sequences", inputs, "totals.sequences, length", "0.0 * totals.sequences + rows, length", lambda: split("reinforce", "seq_mean_token_mean"), "ci"),
    Mutation("D10 rows of padding count as sequences", inputs, "xp.sum(xp.any(flat, axis=1))", "flat.shape[0]", lambda: padded("reinforce", "seq_mean_token_mean"), "ci"),
    Mutation("D10 tokens of the last batch only", inputs, "self.tokens + other.tokens", "other.tokens", lambda: test_steps.test_d10_one_update_from_several_batches("sft"), "soak"),
    Mutation("D10 pairs of the last batch only", inputs, "self.sequences + other.sequences", "other.sequences", lambda: test_steps.test_d10_one_update_from_several_batches("dpo"), "soak"),
    Mutation("L1 logits are not divided by the temperature", logprobs, " / temperature_N[:, None]", "", test_math.test_grpo_at_a_temperature_of_each_row),
    Mutation("L1 all rows have the first one's temperature", scoring, "temperature_of(batch)[places.row]", "temperature_of(batch)[0 * places.row]", test_math.test_grpo_at_a_temperature_of_each_row, "ci"),
    Mutation("L1 the reference has none", logprobs, "stop_gradient(reference_NV).astype(jnp.float32) / temperature_N[:, None]", "stop_gradient(reference_NV).astype(jnp.float32)", test_math.test_grpo_at_a_temperature_of_each_row, "soak"),
    Mutation("M17 the rejected half has the chosen one's mask", pairs, "_widened(action_mask(half), length - 1)", "_widened(action_mask(batch.chosen), length - 1)", lambda: test_math.test_dpo("sigmoid")),
    Mutation("is_mask has no lower end", corrections, "(ratio >= band[0]) & ", "", test_options.test_tokens_outside_the_band_leave_numerator_and_denominator),
    Mutation("is_mask has no upper end", corrections, " & (ratio <= band[1])", "", test_options.test_tokens_outside_the_band_leave_numerator_and_denominator, "soak"),
    Mutation("is_mask keeps what is outside", grpo_advantages, "jnp.where(inside, mask, 0.0)", "jnp.where(inside, mask, mask)", test_options.test_tokens_outside_the_band_leave_numerator_and_denominator, "soak"),
    Mutation("is_mask by sequence goes by the sum", corrections, "keepdims=True) / count", "keepdims=True)", test_options.test_tokens_outside_the_band_leave_numerator_and_denominator, "soak"),
    Mutation("flat groups stay in the mean", grpo_advantages, "[:, None], 0.0, kept)", "[:, None], kept, kept)", test_options.test_flat_groups_leave_numerator_and_denominator, "ci"),
    Mutation("overlong: the punishment begins at the limit", corrections, " - (limit - buffer)", " - limit", test_options.test_overlong_answers),
    Mutation("overlong: long answers are rewarded", grpo_advantages, "rewards + overlong_punishment", "rewards - overlong_punishment", test_options.test_overlong_answers, "soak"),
    Mutation("overlong: an answer of full length is trained", grpo_advantages, "< config.overlong_length", "<= config.overlong_length", test_options.test_overlong_answers, "soak"),
    Mutation("target_kl stops what is near", compiled, '["approx_kl"] <= target_kl', '["approx_kl"] >= target_kl', test_steps.test_target_kl_stops_updates_and_says_so, "soak"),
    Mutation("target_kl is not looked at", compiled, '["approx_kl"] <= target_kl', '["approx_kl"] < 9e9', test_steps.test_target_kl_stops_updates_and_says_so),
    Mutation("T7 the mean is over the configured steps", gradients, "jnp.float32(count)", "jnp.float32(self.config.accumulation_steps)", test_gradients.test_t7_the_mean_is_over_the_steps_that_were_made),
]  # fmt: skip


def split(kind: str, aggregation: str) -> None:
    """A batch in two parts of unequal answers, as `test_d10_…` has it."""
    metrics, after = trainers.step_of(trainers.ALL[kind](loss_aggregation=aggregation), num_microbatches=2)
    whole, expected = trainers.step_of(trainers.ALL[kind](loss_aggregation=aggregation))
    assert metrics == pytest.approx(whole, rel=1e-5, abs=1e-6)
    trainers.assert_same(after, expected)


def padded(kind: str, aggregation: str) -> None:
    """Five rows that a trainer fills up."""
    plain = trainers.ALL[kind](loss_aggregation=aggregation)
    batch = test_steps.odd(plain.batch)
    whole, expected = trainers.step_of(plain, batch)
    filling = trainers.ALL[kind](loss_aggregation=aggregation)
    filling.trainer._shapes.first = (1, 5)
    metrics, after = trainers.step_of(filling, batch)
    assert metrics == pytest.approx(whole, rel=1e-5, abs=1e-6)
    trainers.assert_same(after, expected, rtol=2e-6, atol=1e-8)


def marked() -> list[Any]:
    return [
        pytest.param(mutation, id=mutation.name, marks=getattr(pytest.mark, mutation.tier) if mutation.tier else ())
        for mutation in MUTATIONS
    ]


@pytest.mark.parametrize("mutation", marked())
def test_t12_named_mutations_are_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "_KEPT", {})  # programs of before would not be altered
    with mutated(*mutation[1:4]), pytest.raises(AssertionError):
        mutation.check()


def test_the_checks_hold_where_nothing_is_altered() -> None:
    """Of those checks that are tests nowhere else."""
    padded("reinforce", "seq_mean_token_mean")
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        split("reinforce", aggregation)
    a_constant_is_whitened_to_nothing()
    prompts_are_not_answers()
