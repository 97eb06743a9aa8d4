"""The engine decodes while a trainer steps on the same parameters: nothing that it holds is given away (design, decision 5)."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.models.golden import load_golden
from upweight.inference import InferenceScheduler
from upweight.models.decoder import Decoder
from upweight.training import GroupRolloutBatch, GRPOConfig, GRPOTrainer
from upweight.training.rl import GeneratedSequenceBatch, SequenceRolloutBatch

PROMPTS = [[2, 9, 30, 7], [7, 9, 11, 12]]
LENGTH, ROWS = 12, 8


def group() -> GroupRolloutBatch:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 250, (ROWS, LENGTH)).astype(np.int32)
    answered = np.arange(LENGTH)[None, :] >= 4
    batch = GeneratedSequenceBatch.from_sequences(
        jnp.asarray(tokens),
        response_mask=jnp.asarray(np.broadcast_to(answered, tokens.shape)),
        rewards=jnp.asarray(generator.normal(size=ROWS), jnp.float32),
    )
    old = jnp.full((ROWS, LENGTH - 1), -5.0) * batch.response_mask[:, 1:]
    return GroupRolloutBatch(SequenceRolloutBatch(sequence_batch=batch, old_log_probs=old), 4)


def test_answers_are_the_same_while_the_trainer_steps() -> None:
    small = load_golden("llama-gqa-tied")
    policy = Decoder(small.config, small.params)
    handle, held = small.params["embed"], np.array(small.params["embed"])
    trainer = GRPOTrainer(
        policy, nnx.Optimizer(policy, optax.adam(0.05), wrt=nnx.Param), GRPOConfig(num_generations=4, beta=0.0)
    )
    trained = threading.Event()
    answers: list[list[list[int]]] = []

    with InferenceScheduler(small, small.tokenizer, max_batch_size=8) as scheduler:

        def ask() -> list[list[int]]:
            found: list[list[int]] = scheduler.run_batch(PROMPTS, max_tokens=24, temperature=0.0, ignore_eos=True)
            return found

        quiet = ask()

        def go_on() -> None:
            while not trained.is_set():
                answers.append(ask())

        thread = threading.Thread(target=go_on)
        thread.start()
        before = jax.tree.leaves(nnx.state(policy, nnx.Param))[0].copy()
        for _ in range(3):
            trainer.train_step(group())
        trained.set()
        thread.join()
    assert answers
    assert all(answer == quiet for answer in answers)
    assert not np.array_equal(jax.tree.leaves(nnx.state(policy, nnx.Param))[0], before)
    np.testing.assert_array_equal(np.asarray(handle), held)  # a user's handle is still readable, and unchanged
