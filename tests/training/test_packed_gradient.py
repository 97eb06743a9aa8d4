"""Sharing contexts, cutting into micro-batches and the order of samples change neither log-probs nor gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_makers import (
    PADDED,
    logits_of_rows,
    logprobs_alone,
    make_batch,
    sampled_by,
    standard_batch,
    standard_samples,
)

from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.ops.packing import pack
from upweight.ops.samples import TrainBatch
from upweight.training import policy_trainer
from upweight.training.policy_step import Fixed, Trained, make_gradient
from upweight.training.policy_trainer import PolicyTrainer, Targets
from upweight.training.settings import PRESETS, PolicySettings

TEMPERATURES = [1.0, 0.6, 1.4, 1.0] * 3


def flat(tree: Params) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def gap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def targets_of(batch: TrainBatch, old: np.ndarray | None = None) -> Targets:
    return Targets(np.repeat(batch.reward, batch.lengths), old)


def gradient_of(trainer: PolicyTrainer, batch: TrainBatch, remat: bool = False) -> tuple[np.ndarray, float, np.ndarray]:
    """Gradient over all micro-batches, loss, and log-probs at flat places."""
    everything = np.arange(batch.num_samples)
    old = np.where(batch.mask > 0, batch.logprobs - 0.05, np.nan).astype(np.float32)
    _, pieces = trainer._pieces(batch, everything, targets_of(batch, old))
    gradient = _compiled(trainer.config, trainer.settings, remat)
    total, loss, logprobs = 0.0, 0.0, np.full(len(batch.token_ids), np.nan)
    for rows, packed in pieces:
        grads, metrics, lp = gradient(Trained(trainer.trainable), Fixed(), packed)
        total, loss = total + flat(grads), loss + float(metrics["loss"])
        logprobs[rows.source[rows.weight > 0]] = np.asarray(lp)[rows.weight > 0]
    return total, loss, logprobs


@functools.lru_cache
def _compiled(config: DecoderConfig, settings: PolicySettings, remat: bool):
    return make_gradient(config, settings, 16, remat=remat)


@pytest.fixture(scope="module")
def batch(config: DecoderConfig, params: Params) -> TrainBatch:
    return standard_batch(config, params, temperature=TEMPERATURES)


def test_gradient_is_that_of_samples_run_apart(
    config: DecoderConfig, params: Params, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PolicySettings(algorithm="gspo", preset=PRESETS["gspo"], entropy_coeff=0.01)
    trainer = PolicyTrainer(config, params, settings)
    shared, loss, logprobs = gradient_of(trainer, batch)
    trained = batch.mask > 0
    np.testing.assert_allclose(logprobs[trained], batch.logprobs[trained], atol=1e-5)
    assert np.isnan(logprobs[~trained]).all()

    monkeypatch.setattr(policy_trainer, "pack", functools.partial(pack, share_context=False))
    apart, loss_apart, _ = gradient_of(trainer, batch)
    assert gap(shared, apart) < 1e-5
    assert loss == pytest.approx(loss_apart, rel=1e-5, abs=1e-6)
    monkeypatch.undo()

    trainer.microbatch_tokens = 64
    assert len(trainer._pieces(batch, np.arange(12), targets_of(batch))[1]) > 1
    cut, loss_cut, _ = gradient_of(trainer, batch, remat=True)
    assert gap(cut, apart) < 1e-5
    assert loss_cut == pytest.approx(loss_apart, rel=1e-5, abs=1e-6)
    trainer.microbatch_tokens = 8192

    order = np.random.default_rng(1).permutation(12)
    mixed, loss_mixed, _ = gradient_of(trainer, batch.select(order))
    assert gap(mixed, shared) < 1e-5
    assert loss_mixed == pytest.approx(loss, rel=1e-5, abs=1e-6)


def test_gradient_is_that_of_a_plain_forward_pass(config: DecoderConfig, params: Params) -> None:
    """−Σ advantage·log p / tokens at ratio 1, through the module and `jax.grad`, one sample at a time."""
    samples, reward = standard_samples(3)
    batch = sampled_by(config, params, make_batch(samples, reward))
    settings = PolicySettings(preset=PRESETS["cispo"], correction="none", algorithm="cispo")
    trainer = PolicyTrainer(config, params, settings)
    _, pieces = trainer._pieces(batch, np.arange(12), targets_of(batch))
    grads, _, _ = _compiled(config, settings, False)(Trained(params), Fixed(), pieces[0][1])

    rows, mask = np.zeros((12, PADDED), np.int32), np.zeros((12, PADDED), np.float32)
    for i, (context, answer) in enumerate(samples):
        rows[i, : len(context) + len(answer)] = context + answer
        mask[i, len(context) : len(context) + len(answer)] = 1
    count = mask[:, 1:].sum()

    def loss(params: Params) -> jax.Array:
        logp = jax.nn.log_softmax(logits_of_rows(config, params, rows)[:, :-1])
        lp = jnp.take_along_axis(logp, rows[:, 1:, None], axis=-1)[..., 0]
        return -(lp * mask[:, 1:] * batch.reward[:, None]).sum() / count

    assert gap(flat(grads), flat(jax.jit(jax.grad(loss))(params))) < 1e-5


def test_one_sample_leaves_the_others_alone(config: DecoderConfig, params: Params, batch: TrainBatch) -> None:
    trainer = PolicyTrainer(config, params, PolicySettings(preset=PRESETS["bnpo"], entropy_coeff=0.01))
    before = trainer.score(batch)
    changed = batch.token_ids.copy()
    mine = slice(int(batch.starts[0]), int(batch.starts[1]))
    answer = np.flatnonzero(batch.mask[mine]) + mine.start
    changed[answer] = 28 - changed[answer] % 28
    other = TrainBatch(**{**vars(batch), "token_ids": changed})
    after = trainer.score(other)
    assert np.abs(before[answer] - after[answer]).max() > 0.1
    rest = np.flatnonzero(batch.mask)
    rest = rest[(rest < mine.start) | (rest >= mine.stop)]
    np.testing.assert_array_equal(before[rest], after[rest])
    np.testing.assert_allclose(after[rest], logprobs_alone(config, params, other)[rest], atol=1e-5)
