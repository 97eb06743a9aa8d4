"""Rollouts from a model in this process: rows C10 and T3, and the way from a rollout to PPO."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.rl import small
from tests.training.rl.small import Policy
from upweight.training.rl import (
    GenerationRequest,
    GRPOConfig,
    GRPOTrainer,
    LocalSequenceGenerationBackend,
    LocalSequenceRolloutBackend,
    PPOConfig,
    PPOTrainer,
    SequenceGenerationBackend,
    SequenceGenerationRequest,
    SequencePolicyAdapter,
    SequenceRolloutBackend,
    SequenceValueHeadAdapter,
    with_advantages,
)

PROMPTS = small.tokens(2, 3)
ANSWERS = np.array([[4, 9, 5, 9], [1, 2, 3, 4], [9, 1, 1, 1], [5, 6, 9, 7]], np.int32)  # 9 ends an answer
MASK = np.array([[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0]])


class Generator(Policy):
    """Gives fixed answers and keeps what it was called with."""

    def generate(self, total_samples: int, **kwargs: Any) -> Any:
        self.called = (total_samples, {k: np.shape(v) if hasattr(v, "shape") else v for k, v in kwargs.items()})
        return np.concatenate([np.asarray(kwargs["prompt_tokens"]), ANSWERS], axis=1)


def request(**options: Any) -> SequenceGenerationRequest:
    return SequenceGenerationRequest(
        GenerationRequest(2), PROMPTS, **{"num_generations": 2, "max_new_tokens": 4, "eos_id": 9, **options}
    )


def test_c10_the_response_ends_with_the_first_end_token() -> None:
    model = Generator()
    backend = LocalSequenceGenerationBackend(model)
    batch = backend.generate_sequences(request(top_k=5, seed=7, prompt_mask=np.array([[0, 1, 1], [1, 1, 1]])))
    np.testing.assert_array_equal(batch.response_mask, MASK)
    np.testing.assert_array_equal(batch.prompt_mask[:, :3], [[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]])
    assert not np.asarray(batch.prompt_mask[:, 3:]).any()
    np.testing.assert_array_equal(batch.sequences[:, :3], np.repeat(PROMPTS, 2, axis=0))
    total, given = model.called
    assert total == 4
    assert given == {
        "temperature": 1.0,
        "top_k": 5,
        "prompt_tokens": (4, 3),
        "max_new_tokens": 4,
        "eos_id": 9,
        "prompt_mask": (4, 3),
        "seed": 7,
    }
    everything = backend.generate_sequences(request(eos_id=None))
    assert np.asarray(everything.response_mask[:, 3:]).all()
    assert isinstance(backend, SequenceGenerationBackend)


def test_t3_seeds_reach_the_generator_or_are_refused() -> None:
    seen: list[Any] = []

    def by_key(total: int, *, temperature: float, max_length: int, key: jax.Array) -> Any:
        seen.append(key)
        return np.zeros((total, max_length), np.int32)

    plain = SequenceGenerationRequest(GenerationRequest(3), max_new_tokens=5, seed=11, eos_id=1)
    batch = LocalSequenceGenerationBackend(None, generate_fn=by_key).generate_sequences(plain)
    assert batch.sequences.shape == (3, 5)
    assert (seen[0] == jax.random.key(11)).all()
    backend = LocalSequenceGenerationBackend(None, generate_fn=lambda total, temperature, max_length: None)
    with pytest.raises(ValueError, match="seed is 11, but generate takes neither"):
        backend.generate_sequences(plain)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (np.zeros(4, np.int32), "2-D"),
        (np.zeros((3, 7), np.int32), "3 rows, 4 were asked for"),
        (np.zeros((4, 2), np.int32), "fewer than the 3 of the prompt"),
        (np.full((4, 7), 8, np.int32), "row 0 of sequences does not begin with its prompt"),
    ],
)
def test_what_a_generator_may_not_return(made: np.ndarray, says: str) -> None:
    backend = LocalSequenceGenerationBackend(None, generate_fn=lambda total, **kwargs: made)
    with pytest.raises(ValueError, match=says):
        backend.generate_sequences(request())


def test_c10_rollouts_carry_the_log_probs_of_what_was_sampled() -> None:
    model, reference = Generator(critic=True), Policy(1)
    backend = LocalSequenceRolloutBackend(
        LocalSequenceGenerationBackend(model),
        SequencePolicyAdapter(model),
        reward_model=lambda samples, conditions=None: (np.asarray(samples)[:, 3:] == 9).sum(axis=1),
        reference_scorer=SequencePolicyAdapter(reference),
    )
    group = backend.generate_grouped_rollout(request(temperature=0.5))
    assert isinstance(backend, SequenceRolloutBackend)
    assert (group.group_size, group.num_groups) == (2, 2)
    rollout, ids = group.rollout, np.asarray(group.rollout.sequences)
    logits, active = small.logits_of(small.arrays(model), ids), MASK[:, 1:]
    np.testing.assert_allclose(
        rollout.old_log_probs, small.log_probs_of(2 * logits, ids) * active, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(rollout.raw_log_probs, small.log_probs_of(logits, ids) * active, rtol=1e-4, atol=1e-5)
    assert rollout.sequence_rewards.tolist() == [2, 0, 1, 1]
    other = small.log_probs_of(2 * small.logits_of(small.arrays(reference), ids), ids)
    np.testing.assert_allclose(rollout.sequence_batch.reference_log_probs, other * active, rtol=1e-4, atol=1e-5)
    # The trainer divides by the same temperature: all ratios are 1.
    trainer = GRPOTrainer(model, small.optimizer(model), GRPOConfig(num_generations=2, beta=0.0))
    _, metrics = trainer.train_step(group)
    assert float(metrics["ratio_max"]) == pytest.approx(1.0, abs=1e-5)


def test_filters_show_in_the_log_probs_of_the_sampler() -> None:
    model = Generator()
    backend = LocalSequenceRolloutBackend(LocalSequenceGenerationBackend(model), SequencePolicyAdapter(model))
    rollout = backend.generate_rollout(request(top_k=3))
    ids = np.asarray(rollout.sequences)
    logits = small.logits_of(small.arrays(model), ids)
    third = np.sort(logits, axis=-1)[..., -3:-2]
    kept = np.where(logits >= third, logits, -np.inf)
    with np.errstate(invalid="ignore"):
        expected = small.log_probs_of(kept, ids)
    active = MASK[:, 1:] > 0
    np.testing.assert_allclose(np.asarray(rollout.sampler_log_probs)[active], expected[active], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rollout.old_log_probs, small.log_probs_of(logits, ids) * active, rtol=1e-4, atol=1e-5)


def test_c10_t4_from_a_rollout_to_ppo() -> None:
    """`with_advantages` adds what PPO needs; the trainer computes the same from rewards and its own values."""
    model = Generator(critic=True)
    backend = LocalSequenceRolloutBackend(
        LocalSequenceGenerationBackend(model),
        SequencePolicyAdapter(model),
        reward_model=lambda samples, conditions=None: jnp.arange(4.0),
    )
    rollout = backend.generate_rollout(request())
    ready = with_advantages(rollout, SequenceValueHeadAdapter(model), gamma=0.9, gae_lambda=0.8)
    trainer = PPOTrainer(model, small.optimizer(model), PPOConfig(gamma=0.9, gae_lambda=0.8))
    loss, metrics = trainer.eval_step(rollout)
    again, also = trainer.eval_step(ready)
    assert float(loss) == pytest.approx(float(again), rel=1e-5)
    assert metrics.keys() == also.keys()
    with pytest.raises(ValueError, match="no token_rewards and no sequence rewards"):
        with_advantages(small.rollout(), SequenceValueHeadAdapter(model))
