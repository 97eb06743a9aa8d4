"""Dropout on the inputs of an adapter: what it draws, that it is off where nothing is trained, and that runs go on bit for bit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_makers import logprobs_alone
from test_row_trainer import conversations

from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.models.lora import init_adapter
from upweight.training.checkpoints import load_checkpoint, save_checkpoint
from upweight.training.lora_dropout import Dropping, dropping, key_of
from upweight.training.row_trainer import SupervisedTrainer
from upweight.training.rows import end_to_end
from upweight.training.settings import LoraSettings, PolicySettings
from upweight.weights.fingerprint import fingerprint

RATE = 0.3


def trainer_of(config: DecoderConfig, params: Params, rate: float, **options: int) -> SupervisedTrainer:
    settings = PolicySettings(
        learning_rate=1e-2, batch_size=4, max_grad_norm=None, lora=LoraSettings(rank=4, alpha=8), **options
    )
    return SupervisedTrainer(config, params, settings, conversations(), lora_dropout=rate)


def test_inputs_are_0_or_grown_by_what_is_missing() -> None:
    x = jax.random.normal(jax.random.key(0), (40, 50))
    identity = jnp.eye(50)
    got = np.asarray(jax.jit(lambda x, d: x @ d)(x, Dropping(identity, key_of(0, 1, 2), RATE)))
    dropped = got == 0
    assert dropped.mean() == pytest.approx(RATE, abs=0.04)  # 2000 draws: four standard deviations
    np.testing.assert_allclose(got[~dropped], np.asarray(x)[~dropped] / (1 - RATE), rtol=1e-5)
    slope = jax.grad(lambda x: (x @ Dropping(identity, key_of(0, 1, 2), RATE)).sum())(x)
    np.testing.assert_allclose(slope, np.where(dropped, 0, 1 / (1 - RATE)), rtol=1e-5)
    assert not np.asarray(x @ Dropping(identity, key_of(0, 1, 2), 1.0)).any()


def test_every_matrix_version_and_micro_batch_draws_its_own(config: DecoderConfig) -> None:
    adapter = init_adapter(config, jax.random.key(0), rank=2)
    assert dropping(adapter, key_of(0, 0, 0), 0.0) is adapter
    keys = set()
    for where in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
        layers = dropping(adapter, key_of(*where), RATE)["layers"]
        keys |= {tuple(np.asarray(low["a"].key).tolist()) for layer in layers for low in layer.values()}
    assert len(keys) == 4 * 4 * config.num_layers


def test_an_adapter_of_which_all_is_dropped_has_no_part(config: DecoderConfig, params: Params) -> None:
    trainer = trainer_of(config, params, 1.0)
    trainer.trainable = jax.tree.map(lambda x: x + 0.1, trainer.trainable)
    start = fingerprint(trainer.trainable)
    rows = [trainer.rows[number] for number in trainer.plan.batch(0) if trainer.rows[number].usable]
    batch, _ = end_to_end(rows)
    base = logprobs_alone(config, params, batch)[batch.mask > 0]
    metrics = trainer.train_next().metrics
    assert metrics["loss"] == pytest.approx(-base.mean(), rel=1e-5)
    assert metrics["grad_norm"] == 0
    assert fingerprint(trainer.trainable) == start


def test_validation_drops_nothing_and_a_run_goes_on_bit_for_bit(
    config: DecoderConfig, params: Params, tmp_path: Path
) -> None:
    first = trainer_of(config, params, RATE)
    first.validate_with(conversations(seed=1), lambda version: version == 4)
    first.train_next()
    path = save_checkpoint(tmp_path, first)
    told = [first.train_next() for _ in range(3)]
    batch, _ = end_to_end(first.held_out)
    plain = logprobs_alone(config, first.policy_params(), batch)[batch.mask > 0]
    assert told[-1].metrics["valid_loss"] == pytest.approx(-plain.mean(), rel=1e-4)

    second = trainer_of(config, params, RATE)
    second.validate_with(conversations(seed=1), lambda version: version == 4)
    load_checkpoint(path, second)
    assert [second.train_next() for _ in range(3)] == told
    assert fingerprint(second.policy_params()) == fingerprint(first.policy_params())

    without = trainer_of(config, params, 0.0)
    load_checkpoint(path, without)
    assert without.train_next().metrics["loss"] != told[0].metrics["loss"]
