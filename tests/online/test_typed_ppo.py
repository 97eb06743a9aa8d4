"""Rollouts of the engine as typed batches, and PPO with a value head on them: reward rises, the engine follows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.models.golden import load_golden
from tests.online.test_online_trainer import BATCH, EvenShare, result
from upweight.errors import ConfigError
from upweight.inference import InferenceScheduler
from upweight.models.decoder import Decoder
from upweight.online import RolloutGenerator, RolloutRunner, SamplingTransform, rollout_batch
from upweight.training import PPOConfig, PPOTrainer
from upweight.training.rl import SequencePolicyAdapter
from upweight.weights.fingerprint import fingerprint
from upweight.weights.loading import LoadedModel


class Critic(Decoder):
    """A decoder with a value head; `params()` are the decoder's alone."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model.config, model.params)
        self.values = nnx.Linear(model.config.hidden_size, 1, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))

    def value_head(self, hidden: jax.Array) -> jax.Array:
        return self.values(hidden)


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return load_golden("llama-gqa-tied")


def generator_of(model: LoadedModel, scheduler: Any, **options: Any) -> RolloutGenerator:
    options = {"max_tokens": 6, "group_size": 8, "ignore_eos": True, "seed": 1, **options}
    return RolloutGenerator(scheduler, model.tokenizer, **options)


def test_ppo_learns_from_rollouts_of_the_engine(small: LoadedModel) -> None:
    policy = Critic(small)
    config = PPOConfig(gamma=1.0, entropy_coeff=0.0, max_grad_norm=1.0)
    trainer = PPOTrainer(policy, nnx.Optimizer(policy, optax.adam(0.01), wrt=nnx.Param), config)
    rewards = []
    with InferenceScheduler(small, small.tokenizer, max_batch_size=16) as scheduler:
        runner = RolloutRunner(generator_of(small, scheduler, temperature=0.8), EvenShare(), rollout_interval=1)
        for version in range(1, 16):
            rollout, is_fresh = runner(BATCH)
            assert is_fresh
            typed = rollout_batch(rollout).rollout
            if version in (1, 8):  # the engine sampled from the very policy that is trained
                mine = SequencePolicyAdapter(policy).action_log_probs(typed)
                gap = jnp.abs(mine - typed.old_log_probs) * typed.action_mask
                assert float(gap.max()) < 1e-4
            _, metrics = trainer.update(typed, epochs=2, minibatch_size=8, seed=version)
            assert float(metrics["update_skipped"]) == 0
            assert float(metrics["value_loss"]) > 0
            scheduler.set_weights(policy.params(), version)
            runner.step()
            rewards.append(float(np.asarray(rollout.rewards).mean()))
        assert scheduler.engine.fingerprint() == fingerprint(policy.params())
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards


def test_rows_of_a_typed_batch() -> None:
    typed = rollout_batch(result(transform=SamplingTransform(temperature=0.5)))
    rollout = typed.rollout
    assert (typed.group_size, typed.num_groups) == (2, 2)
    assert rollout.sequences.tolist() == [[5, 0, 0, 8, 0], [5, 0, 3, 0, 0], [9, 6, 7, 4, 4], [9, 6, 7, 0, 0]]
    assert rollout.response_mask.tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert rollout.prompt_mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert rollout.old_log_probs.tolist() == [[0, -1, -2, 0], [0, -3, 0, 0], [0, 0, -4, -5], [0, 0, 0, 0]]
    assert rollout.sequence_rewards.tolist() == [0, 1, 0.5, 0]
    assert rollout.valid.tolist() == [True, True, True, False]
    assert rollout.temperature.tolist() == [0.5] * 4
    assert rollout.raw_log_probs is None


def test_what_cannot_be_computed_again_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"drawn with top_p = 0\.9 cannot be trained on"):
        rollout_batch(result(transform=SamplingTransform(top_p=0.9)))
    with pytest.raises(ConfigError, match="prompt_mask is None"):
        rollout_batch(result(prompt_mask=None))
