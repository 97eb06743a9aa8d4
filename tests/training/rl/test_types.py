"""The typed batches: what they compute, what they refuse, and that JAX sees them as trees of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upweight.errors import UpweightError
from upweight.training.rl.padding import pad_rollout
from upweight.training.rl.types import (
    GeneratedBatch,
    GeneratedSequenceBatch,
    GenerationRequest,
    GroupRolloutBatch,
    IterativeGenerationBatch,
    IterativeGenerationRequest,
    PreferenceBatch,
    SequenceGenerationRequest,
    SequenceRolloutBatch,
    TrajectoryBatch,
    canonicalize_response_mask,
    prepare_autoregressive_token_mask,
)

TOKENS = np.arange(12, dtype=np.int32).reshape(3, 4)
ONES = np.ones((3, 4), np.float32)
ACTIONS = np.ones((3, 3), np.float32)
REQUEST = GenerationRequest(num_samples=3)
GENERATION = GeneratedBatch(TOKENS)
SEQUENCES = GeneratedSequenceBatch(GENERATION)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: TrajectoryBatch(ONES, rewards=np.ones(2)), ValueError, "^rewards has shape"),
        (lambda: TrajectoryBatch(ONES, dones=np.ones(4)), ValueError, "^dones has shape"),
        (lambda: GenerationRequest(num_samples=0), ValueError, "num_samples is 0"),
        (lambda: GenerationRequest(2, {"text": np.ones(3)}), ValueError, r"conditioning\['text'\]"),
        (lambda: GenerationRequest(2, generation_metadata=[1.0]), TypeError, "generation_metadata"),
        (lambda: SequenceGenerationRequest(REQUEST, num_generations=0), ValueError, "num_generations"),
        (lambda: SequenceGenerationRequest(REQUEST, max_new_tokens=-1), ValueError, "max_new_tokens"),
        (lambda: SequenceGenerationRequest(REQUEST, prompt_mask=ONES), ValueError, "prompt_mask is given without"),
        (lambda: SequenceGenerationRequest(REQUEST, prompts=np.ones(3)), ValueError, "prompts has shape"),
        (lambda: SequenceGenerationRequest(REQUEST, prompts=np.ones((2, 4))), ValueError, "prompts has shape"),
        (lambda: SequenceGenerationRequest(REQUEST, TOKENS, ONES[:, 1:]), ValueError, "prompt_mask has shape"),
        (lambda: SequenceGenerationRequest(REQUEST, temperature=-0.1), ValueError, "temperature is -0.1"),
        (lambda: SequenceGenerationRequest(REQUEST, temperature=float("nan")), ValueError, "temperature is nan"),
        (lambda: SequenceGenerationRequest(REQUEST, top_k=-1), ValueError, "top_k is -1"),
        (lambda: SequenceGenerationRequest(REQUEST, top_p=0.0), ValueError, "top_p is 0.0"),
        (lambda: SequenceGenerationRequest(REQUEST, top_p=1.1), ValueError, "top_p is 1.1"),
        (lambda: IterativeGenerationRequest(REQUEST, np.ones((2, 5))), ValueError, "step_indices"),
        (lambda: IterativeGenerationRequest(REQUEST, np.ones((3, 5)), ONES), ValueError, "trajectory_mask"),
        (lambda: GeneratedBatch(TOKENS, rewards=np.ones((3, 1))), ValueError, "rewards has shape"),
        (lambda: GeneratedBatch(TOKENS, rewards=[1.0, 2.0]), ValueError, "rewards has shape"),
        (lambda: GeneratedBatch(TOKENS, rewards=["good"] * 3), TypeError, "rewards is a list"),
        (lambda: GeneratedBatch(TOKENS, output_mask=ACTIONS), ValueError, "output_mask has shape"),
        (lambda: GeneratedBatch(TOKENS, old_log_probs=np.ones((2, 3))), ValueError, "old_log_probs has shape"),
        (lambda: GeneratedBatch(TOKENS, conditioning=np.ones(4)), ValueError, "conditioning has shape"),
        (lambda: GeneratedBatch(TOKENS, generation_metadata="seed"), TypeError, "generation_metadata is a str"),
        (lambda: GeneratedSequenceBatch(GeneratedBatch(np.ones(3))), ValueError, "sequences has shape"),
        (lambda: GeneratedSequenceBatch(GENERATION, response_mask=ACTIONS), ValueError, "response_mask has shape"),
        (lambda: GeneratedSequenceBatch(GENERATION, prompt_mask=ACTIONS), ValueError, "prompt_mask has shape"),
        (
            lambda: SequenceRolloutBatch(GeneratedSequenceBatch(GeneratedBatch(np.ones((3, 4, 2))))),
            ValueError,
            "sequences has shape",
        ),
        *(
            (lambda name=name: SequenceRolloutBatch(SEQUENCES, **{name: ONES}), ValueError, f"^{name} has shape")
            for name in ("old_log_probs", "token_rewards", "returns", "advantages", "dones", "sampler_log_probs")
        ),
        (lambda: SequenceRolloutBatch(SEQUENCES, values=np.ones((3, 2))), ValueError, "values has shape"),
        (lambda: SequenceRolloutBatch(SEQUENCES, valid=np.ones((3, 1))), ValueError, "valid has shape"),
        (lambda: IterativeGenerationBatch(GENERATION, transition_log_probs=np.ones(3)), ValueError, "transition_log"),
        (lambda: PreferenceBatch(TOKENS, SEQUENCES), TypeError, "chosen is a ndarray"),
        (lambda: PreferenceBatch(SEQUENCES, GeneratedBatch(TOKENS[:2])), ValueError, "same batch size"),
        (lambda: GroupRolloutBatch(SequenceRolloutBatch(SEQUENCES), 0), ValueError, "positive"),
        (
            lambda: GroupRolloutBatch(SequenceRolloutBatch(SEQUENCES), 2),
            ValueError,
            "3 is not divisible into groups of 2",
        ),
        (lambda: canonicalize_response_mask(TOKENS, np.ones((3, 2))), ValueError, "response_mask"),
    ],
)
def test_refused(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        make()
    assert isinstance(caught.value, UpweightError)


def test_properties() -> None:
    prompts = SequenceGenerationRequest(REQUEST, TOKENS, num_generations=4, max_new_tokens=2)
    assert (prompts.batch_size, prompts.total_samples, prompts.prompt_length) == (3, 12, 4)
    assert (prompts.temperature, prompts.top_k, prompts.top_p, prompts.seed) == (1.0, None, None, None)
    steps = IterativeGenerationRequest(REQUEST, trajectory_mask=np.ones((3, 7)))
    assert (steps.batch_size, steps.num_steps) == (3, 7)
    made = IterativeGenerationBatch(GENERATION, transition_log_probs=np.ones((3, 7)))
    assert (made.batch_size, made.num_steps) == (3, 7)
    rollout = SequenceRolloutBatch(SEQUENCES)
    assert (rollout.batch_size, rollout.action_shape, rollout.num_action_tokens) == (3, (3, 3), 3)
    group = GroupRolloutBatch(rollout=rollout, group_size=3)
    assert (group.batch_size, group.num_groups) == (3, 1)
    assert TrajectoryBatch([[1.0], [2.0]]).batch_size == 2


def test_lists_are_converted() -> None:
    batch = GeneratedSequenceBatch.from_sequences(
        [[1, 2], [3, 4]], rewards=[0, 1], response_mask=[[0, 1], [0, 1]], conditioning={"prompt": np.ones((2, 5))}
    )
    assert isinstance(batch.sequences, jax.Array)
    assert isinstance(batch.rewards, jax.Array)
    assert batch.conditioning["prompt"].shape == (2, 5)
    assert SequenceRolloutBatch(batch).action_mask.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"prompt_mask": [[1, 1, 0, 0, 0, 0]]}, [0, 1, 1, 1, 1]),
        ({"prompt_mask": [[1, 1, 0, 0, 0, 0]], "response_mask": [[0, 0, 1, 1, 0, 0]]}, [0, 1, 1, 0, 0]),
        ({"response_mask": [[1, 0, 0, 0, 0, 1]]}, [0, 0, 0, 0, 1]),
    ],
)
def test_action_mask(masks: dict[str, Any], expected: list[float]) -> None:
    batch = GeneratedSequenceBatch.from_sequences(np.zeros((1, 6), np.int32), **masks)
    mask = SequenceRolloutBatch(batch).action_mask
    assert mask.dtype == jnp.float32
    assert mask.tolist() == [expected]


def test_output_mask_and_invalid_rows_leave_the_action_mask() -> None:
    generation = GeneratedBatch(TOKENS, output_mask=np.array([[1, 1, 1, 0]] * 3))
    rollout = SequenceRolloutBatch(GeneratedSequenceBatch(generation), valid=np.array([True, False, True]))
    assert rollout.action_mask.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 0]]


def test_masks_over_actions_get_a_zero_column() -> None:
    assert canonicalize_response_mask(TOKENS, ACTIONS).tolist() == [[0, 1, 1, 1]] * 3
    assert canonicalize_response_mask(TOKENS, ONES) is not None
    assert canonicalize_response_mask(TOKENS, None) is None
    assert prepare_autoregressive_token_mask(TOKENS, None).tolist() == [[1, 1, 1]] * 3
    assert prepare_autoregressive_token_mask(TOKENS, [[1, 0, 0, 2]] * 3).tolist() == [[0, 0, 1]] * 3
    assert prepare_autoregressive_token_mask(TOKENS, np.array([[1, 0, 1]] * 3)).tolist() == [[1, 0, 1]] * 3


def test_batches_are_pytrees_with_static_integers() -> None:
    group = GroupRolloutBatch(SequenceRolloutBatch(SEQUENCES, old_log_probs=ACTIONS), 3)
    assert len(jax.tree.leaves(group)) == 2
    doubled = jax.tree.map(lambda x: jnp.concatenate([x, x]), group)
    assert (doubled.batch_size, doubled.group_size, doubled.num_groups) == (6, 3, 2)
    total = jax.jit(lambda batch: batch.rollout.old_log_probs.sum() * batch.group_size)(group)
    assert total == 27
    slope = jax.grad(lambda batch: batch.rollout.old_log_probs.sum() ** 2, allow_int=True)(group)
    assert slope.rollout.old_log_probs[0, 0] == 18


def test_float_tokens_are_accepted_by_containers() -> None:
    assert GeneratedSequenceBatch.from_sequences(TOKENS.astype(np.float32)).batch_size == 3


def test_a_last_value_stays_last_when_a_batch_is_padded() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    wide = pad_rollout(SequenceRolloutBatch(SEQUENCES, values=values, returns=ACTIONS), 4, 6)
    assert wide.values[0].tolist() == [0, 1, 2, 0, 0, 3]
    assert wide.returns[0].tolist() == [1, 1, 1, 0, 0]
    assert wide.action_mask.tolist() == [[1, 1, 1, 0, 0]] * 3 + [[0] * 5]
    short = pad_rollout(SequenceRolloutBatch(SEQUENCES, values=values[:, :3]), 3, 6)
    assert short.values[0].tolist() == [0, 1, 2, 0, 0]
