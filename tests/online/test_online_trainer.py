"""Rollout → update → hand-over in one process, and what is refused there."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.golden import load_golden
from upweight.errors import ConfigError, ModelError, TrainingError
from upweight.inference import InferenceScheduler
from upweight.online import (
    BaseRewardModel,
    OnlineTrainer,
    RolloutGenerator,
    RolloutResult,
    RolloutRunner,
    SamplingTransform,
    preference_pairs,
    train_batch,
)
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import PolicySettings
from upweight.weights.fingerprint import fingerprint
from upweight.weights.loading import LoadedModel

# A real token 0 inside a prompt, and padding on the left of the first one.
BATCH = {"input_ids": [[2, 2, 9, 0, 30], [7, 0, 9, 11, 12]]}


class EvenShare(BaseRewardModel):
    def score(self, prompts: list[str], responses: list[list[str]], *, token_ids: Any) -> Any:
        return [[float(np.mean([i % 2 == 0 for i in ids])) for ids in row] for row in token_ids]


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    """257 ids, so that twenty steps can learn something."""
    return load_golden("llama-gqa-tied")


def make(model: LoadedModel, settings: PolicySettings, interval: int = 1, **options: Any) -> OnlineTrainer:
    scheduler = InferenceScheduler(model, model.tokenizer, max_batch_size=8)
    options = {"max_tokens": 6, "group_size": 4, "ignore_eos": True, "seed": 1, **options}
    generator = RolloutGenerator(scheduler, model.tokenizer, **options)
    return OnlineTrainer(
        RolloutRunner(generator, EvenShare(), interval), PolicyTrainer(model.config, model.params, settings)
    )


GROUPED = PolicySettings(advantage="group", learning_rate=0.01)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_without_a_learning_rate_sampler_and_trainer_agree_to_the_last_step(
    small: LoadedModel, temperature: float
) -> None:
    loop = make(small, replace(GROUPED, learning_rate=0.0), temperature=temperature)
    steps = [loop.train(BATCH) for _ in range(3)]
    loop.scheduler.stop()
    assert [step.metrics["on_policy_tokens"] for step in steps] == [48.0] * 3
    assert max(step.metrics["mismatch_max"] for step in steps) < 1e-4
    assert max(abs(step.metrics["is_weight_mean"] - 1) for step in steps) < 1e-4
    assert steps[0].result.responses.tolist() != steps[1].result.responses.tolist()


def test_reward_rises_and_the_engine_has_the_weights_of_the_trainer(small: LoadedModel) -> None:
    loop = make(small, GROUPED, group_size=8)
    rewards = []
    for number in range(1, 21):
        step = loop.train(BATCH)
        assert (step.version, step.is_fresh) == (number, True)
        assert step.metrics.get("mismatch_max", 0.0) < 1e-3  # absent once all rewards are equal
        assert loop.scheduler.weights_version == number
        rewards.append(step.reward_mean)
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.3, rewards
    assert loop.scheduler.engine.fingerprint() == fingerprint(loop.trainer.policy_params())
    loop.scheduler.stop()


def test_replayed_rollouts_are_trained_as_what_they_are(small: LoadedModel) -> None:
    loop = make(small, replace(GROUPED, correction="none"), interval=3)
    steps = [loop.train(BATCH) for _ in range(4)]
    loop.scheduler.stop()
    assert [step.is_fresh for step in steps] == [True, False, False, True]
    assert steps[1].result is steps[0].result
    assert steps[3].result is not steps[0].result
    # The ratio is taken against the policy that sampled, which is the present one only when the rollout is fresh.
    assert steps[0].metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert steps[2].metrics["ratio_max"] > 1.01
    assert steps[3].metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert [step.metrics["on_policy_tokens"] for step in steps] == [48.0, 0.0, 0.0, 48.0]


def test_groups_of_one_are_refused_where_they_are_compared(small: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"group_size is 1, but grpo compares .*: use a group_size of at least 2"):
        make(small, GROUPED, group_size=1)
    baseline = PolicySettings.from_method({"algorithm": "reinforce_pp_baseline", "advantage": "reward"})
    with pytest.raises(ConfigError, match="group_size is 1, but reinforce_pp_baseline compares"):
        make(small, baseline, group_size=1)
    given = make(small, PolicySettings(learning_rate=0.01), group_size=1)
    assert given.train(BATCH).metrics["samples_trained"] > 0
    given.scheduler.stop()


@pytest.mark.parametrize(
    "option",
    [{"top_k": 5}, {"top_p": 0.9}, {"frequency_penalty": 0.5}, {"min_tokens": 2}, {"temperature": 0}],
)
def test_distributions_that_a_trainer_cannot_repeat_are_refused(small: LoadedModel, option: dict) -> None:
    name, value = next(iter(option.items()))
    with pytest.raises(ConfigError, match=f"rollouts drawn with {name} = {value} cannot be trained on"):
        make(small, GROUPED, **option)


def result(**changes: Any) -> RolloutResult:
    made = RolloutResult(
        prompts=jnp.array([[9, 5, 0], [9, 6, 7]]),
        prompt_mask=jnp.array([[False, True, True], [True, True, True]]),
        responses=jnp.array([[[0, 8], [3, 0]], [[4, 4], [0, 0]]]),
        response_mask=jnp.array([[[True, True], [True, False]], [[True, True], [False, False]]]),
        logprobs_old=jnp.array([[[-1.0, -2.0], [-3.0, 0.0]], [[-4.0, -5.0], [0.0, 0.0]]]),
        rewards=jnp.array([[0.0, 1.0], [0.5, 0.0]]),
        valid=jnp.array([[True, True], [True, False]]),
    )
    return replace(made, **changes)


def test_rows_of_a_train_batch() -> None:
    batch = train_batch(result())
    assert batch.lengths.tolist() == [4, 3, 5]
    assert batch.token_ids.tolist() == [5, 0, 0, 8, 5, 0, 3, 9, 6, 7, 4, 4]  # real zeros stay, padding goes
    assert batch.mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1]
    assert batch.logprobs.tolist() == [0, 0, -1, -2, 0, 0, -3, 0, 0, 0, -4, -5]
    assert batch.reward.tolist() == [0, 1, 0.5]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.versions.tolist() == [-1] * 12
    assert batch.truncated.tolist() == [0, 0, 0]
    reasons = [["length", "stop"], ["length", "error"]]
    assert train_batch(result(finish_reasons=reasons)).truncated.tolist() == [1, 0, 1]
    two = train_batch(result(weights_version=jnp.array([[3, 3], [4, -1]])), result())
    assert two.group.tolist() == [0, 0, 1, 2, 2, 3]
    assert two.versions[:12].tolist() == [-1, -1, 3, 3, -1, -1, 3, -1, -1, -1, 4, 4]
    tempered = train_batch(result(transform=SamplingTransform(temperature=0.5)))
    assert tempered.temperature.tolist() == [1, 1, 0.5, 0.5, 1, 1, 0.5, 1, 1, 1, 0.5, 0.5]


def test_mixtures_are_refused() -> None:
    with pytest.raises(ConfigError, match="different distributions in one batch"):
        train_batch(result(), result(transform=SamplingTransform(temperature=0.5)))
    with pytest.raises(ConfigError, match=r"drawn with top_p = 0\.9 cannot be trained on"):
        train_batch(result(transform=SamplingTransform(top_p=0.9)))
    with pytest.raises(ConfigError, match=r"logprobs_old differ from logprobs_raw by up to 0\.5"):
        train_batch(result(logprobs_raw=result().logprobs_old - 0.5))
    with pytest.raises(ConfigError, match="prompt_mask is None"):
        train_batch(result(prompt_mask=None))
    with pytest.raises(TrainingError, match="no response of the rollout is valid"):
        train_batch(result(valid=jnp.zeros((2, 2), bool)))


def test_pairs_hold_the_prompt_and_skip_ties() -> None:
    pairs = preference_pairs(result())
    assert pairs.tied_groups == 1  # the second prompt has one response only
    assert pairs.chosen_ids.tolist() == [[5, 0, 3, 0]]
    assert pairs.chosen_mask.tolist() == [[True, True, True, False]]
    assert pairs.chosen_response_mask.tolist() == [[False, False, True, False]]
    assert pairs.rejected_ids.tolist() == [[5, 0, 0, 8]]
    assert pairs.rejected_response_mask.tolist() == [[False, False, True, True]]
    tied = preference_pairs(result(rewards=jnp.array([[1.0, 1.0], [1.0, 1.0]])))
    assert tied.tied_groups == 2
    assert tied.chosen_ids.shape == (0, 0)


def test_a_trainer_of_another_model_is_found_at_the_start(small: LoadedModel) -> None:
    scheduler = InferenceScheduler(small, small.tokenizer, max_batch_size=2)
    generator = RolloutGenerator(scheduler, small.tokenizer, max_tokens=2, group_size=2)
    other = replace(small.config, norm_eps=0.1)
    with pytest.raises(ModelError, match="engine and trainer disagree"):
        OnlineTrainer(RolloutRunner(generator, EvenShare()), PolicyTrainer(other, small.params, GROUPED))
    scheduler.stop()
