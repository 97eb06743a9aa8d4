"""Updates on rows of a file, compared with each sequence run alone and formulas written out in float64."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_makers import logits_of_rows, logprobs_alone

from upweight.models.config import DecoderConfig
from upweight.models.decoder import Decoder
from upweight.models.layers import Params
from upweight.models.lora import merge
from upweight.training.checkpoints import load_checkpoint, save_checkpoint
from upweight.training.row_trainer import PreferenceSettings, PreferenceTrainer, RowTrainer, SupervisedTrainer
from upweight.training.rows import Plan, TokenSequence, TrainRow, end_to_end
from upweight.training.settings import LoraSettings, PolicySettings
from upweight.weights.fingerprint import fingerprint

SETTINGS = PolicySettings(learning_rate=1e-2, batch_size=4, max_grad_norm=None)
BETA = 0.3


def sequence(rng: np.random.Generator, *turns: tuple[int, int]) -> TokenSequence:
    """Turns of (context, answer) lengths."""
    mask = np.array([m for context, answer in turns for m in [0] * context + [1] * answer], np.uint8)
    return TokenSequence(ids=rng.integers(1, 29, len(mask)).astype(np.int32), mask=mask)


def conversations(seed: int = 0) -> list[TrainRow]:
    """Six rows: one turn, two turns, one of two sequences, one without anything to train on."""
    rng = np.random.default_rng(seed)
    parts = [
        (sequence(rng, (5, 3)),),
        (sequence(rng, (3, 4), (6, 2)),),
        (sequence(rng, (4, 2)), sequence(rng, (9, 5))),
        (sequence(rng, (8, 0)),),
        (sequence(rng, (2, 11)),),
        (sequence(rng, (7, 1)),),
    ]
    return [TrainRow(line=i + 1, parts=(part,)) for i, part in enumerate(parts)]


def pairs(seed: int = 0) -> list[TrainRow]:
    """Five pairs; both answers of a pair have the same context."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(5):
        context = rng.integers(1, 29, 3 + number).astype(np.int32)
        answers = [rng.integers(1, 29, int(rng.integers(1, 9))).astype(np.int32) for _ in range(2)]
        made = tuple(
            (
                TokenSequence(
                    ids=np.concatenate([context, a]), mask=np.repeat([0, 1], [len(context), len(a)]).astype("u1")
                ),
            )
            for a in answers
        )
        rows.append(TrainRow(line=number + 1, parts=made))
    return rows


def scores_alone(config: DecoderConfig, params: Params, rows: list[TrainRow], *, means: bool = False) -> np.ndarray:
    """float64 [rows, parts]: sums (or means) of the trained tokens' log-probs, each sequence run by itself."""
    batch, slots = end_to_end(rows)
    slot_T = np.repeat(slots, batch.lengths)
    trained = batch.mask > 0
    sums = np.bincount(slot_T[trained], logprobs_alone(config, params, batch)[trained].astype(np.float64))
    counts = np.bincount(slot_T[trained])
    return (sums / counts if means else sums).reshape(len(rows), -1)


def chosen_rows(trainer: RowTrainer) -> list[TrainRow]:
    return [trainer.rows[number] for number in trainer.plan.batch(trainer.version) if trainer.rows[number].usable]


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4, alpha=8)])
def test_supervised_loss_accuracy_and_gradient_are_those_of_plain_cross_entropy(
    config: DecoderConfig, params: Params, lora: LoraSettings | None
) -> None:
    settings = PolicySettings(learning_rate=1e-2, batch_size=4, max_grad_norm=None, lora=lora)
    trainer = SupervisedTrainer(config, params, settings, conversations())
    trainer.train_next()  # so that an adapter is not zero any more
    now, rows = trainer.policy_params(), chosen_rows(trainer)
    batch, _ = end_to_end(rows)
    logprobs = logprobs_alone(config, now, batch).astype(np.float64)
    tokens = int(batch.mask.sum())
    metrics = trainer.train_next().metrics
    assert metrics["num_tokens"] == metrics["trained_tokens"] == tokens
    assert metrics["loss"] == pytest.approx(-logprobs[batch.mask > 0].sum() / tokens, rel=1e-5)
    assert metrics["token_accuracy"] == pytest.approx(right_tokens(config, now, rows) / tokens, abs=1e-6)
    if lora is None:
        each = [(one, -1 / tokens) for row in rows for part in row.parts for one in part]
        assert metrics["grad_norm"] == pytest.approx(weighted_gradient_norm(config, now, each), rel=1e-4)


def right_tokens(config: DecoderConfig, params: Params, rows: list[TrainRow]) -> int:
    count = 0
    for one in (one for row in rows for part in row.parts for one in part):
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(one.ids)] = one.ids
        best = np.asarray(logits_of_rows(config, params, padded))[0].argmax(-1)[: len(one.ids) - 1]
        count += int(((best == one.ids[1:]) & (one.mask[1:] > 0)).sum())
    return count


@functools.partial(jax.jit, static_argnums=0)
def score_gradient(config: DecoderConfig, params: Params, ids_T: jax.Array, mask_T: jax.Array) -> Params:
    """Of the sum of the trained tokens' log-probs, from whole logits."""

    def score(tree: Params) -> jax.Array:
        logp = jax.nn.log_softmax(Decoder(config, tree)(ids_T[None])[0, :-1])
        return (jnp.take_along_axis(logp, ids_T[1:, None], 1)[:, 0] * mask_T[1:]).sum()

    return jax.grad(score)(params)


def weighted_gradient_norm(config: DecoderConfig, params: Params, weights: list[tuple[TokenSequence, float]]) -> float:
    """Norm of the sum of weight · ∇score over the sequences."""
    total: list[np.ndarray] = []
    for one, weight in weights:
        ids, mask = (np.pad(array, (0, 48 - len(array))) for array in (one.ids, one.mask))
        leaves = [
            weight * np.asarray(g, np.float64) for g in jax.tree.leaves(score_gradient(config, params, ids, mask))
        ]
        total = [a + b for a, b in zip(total, leaves, strict=True)] if total else leaves
    return float(np.sqrt(sum((leaf**2).sum() for leaf in total)))


def test_neither_micro_batches_nor_rows_of_their_own_change_an_update(config: DecoderConfig, params: Params) -> None:
    kinds = [{}, {"microbatch_tokens": 32}, {"share_rows": False}]
    told = []
    for kind in kinds:
        trainer = SupervisedTrainer(config, params, SETTINGS, conversations(), **kind)
        told.append((trainer.train_next().metrics, trainer.policy_params()))
    for metrics, after in told[1:]:
        assert metrics["loss"] == pytest.approx(told[0][0]["loss"], rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(told[0][0]["grad_norm"], rel=1e-5)
        np.testing.assert_allclose(after["embed"], told[0][1]["embed"], atol=2e-4)
    assert told[2][0]["packed_tokens"] == told[0][0]["packed_tokens"]


def expected_loss(kind: PreferenceSettings, margin: np.ndarray) -> float:
    x, share = kind.beta * margin, kind.label_smoothing
    up, down = -np.log1p(np.exp(-x)), -np.log1p(np.exp(x))
    formulas = {
        "sigmoid": -(1 - share) * up - share * down,
        "robust": (-(1 - share) * up + share * down) / (1 - 2 * share),
        "ipo": (margin - 1 / (2 * kind.beta)) ** 2,
        "simpo": np.log1p(np.exp(-(x - 0.5))),
    }
    return float(formulas[kind.loss_type].mean())


@pytest.mark.parametrize(
    "kind",
    [
        PreferenceSettings(beta=BETA, label_smoothing=0.2),
        PreferenceSettings(beta=BETA, length_normalized=True),
        PreferenceSettings(beta=BETA, loss_type="robust", label_smoothing=0.1),
        PreferenceSettings(beta=BETA, loss_type="ipo"),
        PreferenceSettings(beta=BETA, loss_type="simpo"),
    ],
    ids=lambda kind: f"{kind.loss_type}-{kind.label_smoothing}-{kind.length_normalized}",
)
def test_preference_losses_are_the_formulas_against_the_start_model(
    config: DecoderConfig, params: Params, kind: PreferenceSettings
) -> None:
    trainer = PreferenceTrainer(config, params, SETTINGS, pairs(), preference=kind)
    trainer.train_next()
    now, rows = trainer.policy_params(), chosen_rows(trainer)
    ratios = scores_alone(config, now, rows, means=kind.means)
    if kind.needs_reference:
        ratios = ratios - scores_alone(config, params, rows, means=kind.means)
    margin = ratios[:, 0] - ratios[:, 1]
    metrics = trainer.train_next().metrics
    assert metrics["loss"] == pytest.approx(expected_loss(kind, margin), rel=2e-5)
    assert metrics["margin"] == pytest.approx(margin.mean(), rel=1e-4, abs=1e-5)
    assert metrics["reward_accuracy"] == pytest.approx((margin > 0).mean())
    assert metrics["rewards_chosen"] == pytest.approx(BETA * ratios[:, 0].mean(), rel=1e-4, abs=1e-5)
    assert metrics["rewards_rejected"] == pytest.approx(BETA * ratios[:, 1].mean(), rel=1e-4, abs=1e-5)


def test_the_first_preference_loss_is_log_2_and_its_gradient_that_of_the_formula(
    config: DecoderConfig, params: Params
) -> None:
    whole = PreferenceTrainer(config, params, SETTINGS, pairs(), preference=PreferenceSettings(beta=BETA))
    rows = chosen_rows(whole)

    # −log σ(β·margin) falls with β/2 a unit of margin where the margin is 0.
    share = BETA / 2 / len(rows)
    each = [(row.parts[place][0], sign * share) for row in rows for place, sign in ((0, -1), (1, 1))]
    norm = weighted_gradient_norm(config, params, each)
    metrics = whole.train_next().metrics
    assert metrics["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    kind = PreferenceSettings(beta=BETA)
    cut = PreferenceTrainer(config, params, SETTINGS, pairs(), preference=kind, microbatch_tokens=32)
    assert cut.train_next().metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_an_adapter_is_compared_with_its_base(config: DecoderConfig, params: Params) -> None:
    lora = LoraSettings(rank=4, alpha=8)
    settings = PolicySettings(learning_rate=1e-2, batch_size=4, max_grad_norm=None, lora=lora)
    trainer = PreferenceTrainer(config, params, settings, pairs(), preference=PreferenceSettings(beta=BETA))
    trainer.train_next()
    rows = chosen_rows(trainer)
    merged = merge(params, trainer.trainable, lora.scale)
    ratios = scores_alone(config, merged, rows) - scores_alone(config, params, rows)
    assert trainer.train_next().metrics["margin"] == pytest.approx((ratios[:, 0] - ratios[:, 1]).mean(), rel=1e-3)


def test_rows_that_are_held_out_are_measured_when_they_should_be(config: DecoderConfig, params: Params) -> None:
    trainer = SupervisedTrainer(config, params, SETTINGS, conversations())
    trainer.validate_with(conversations(seed=1), lambda version: version == 2)
    assert "valid_loss" not in trainer.train_next().metrics
    metrics = trainer.train_next().metrics
    batch, _ = end_to_end([row for row in conversations(seed=1) if row.usable])
    logprobs = logprobs_alone(config, trainer.policy_params(), batch).astype(np.float64)
    assert metrics["valid_loss"] == pytest.approx(-logprobs[batch.mask > 0].mean(), rel=1e-5)
    rows = [row for row in conversations(seed=1) if row.usable]
    right = right_tokens(config, trainer.policy_params(), rows) / batch.mask.sum()
    assert metrics["valid_token_accuracy"] == pytest.approx(right, abs=1e-6)


def test_pairs_that_are_held_out_are_measured_against_the_start_model(config: DecoderConfig, params: Params) -> None:
    kind = PreferenceSettings(beta=BETA, label_smoothing=0.2)
    trainer = PreferenceTrainer(config, params, SETTINGS, pairs(), preference=kind)
    trainer.validate_with(pairs(seed=1), lambda version: True)
    trainer.train_next()
    metrics = trainer.train_next().metrics
    now, rows = trainer.policy_params(), pairs(seed=1)
    ratios = scores_alone(config, now, rows) - scores_alone(config, params, rows)
    margin = ratios[:, 0] - ratios[:, 1]
    assert metrics["valid_loss"] == pytest.approx(expected_loss(kind, margin), rel=1e-4)
    assert metrics["valid_margin"] == pytest.approx(margin.mean(), rel=1e-3, abs=1e-4)
    assert metrics["valid_reward_accuracy"] == pytest.approx((margin > 0).mean())


@pytest.mark.parametrize("kind", ["supervised", "dpo"])
def test_a_run_that_goes_on_from_a_checkpoint_computes_the_same_bits(
    config: DecoderConfig, params: Params, tmp_path: Path, kind: str
) -> None:
    def build() -> RowTrainer:
        if kind == "supervised":
            return SupervisedTrainer(config, params, SETTINGS, conversations())
        return PreferenceTrainer(config, params, SETTINGS, pairs(), preference=PreferenceSettings(beta=BETA))

    first = build()
    for _ in range(3):  # to the middle of the second epoch
        first.train_next()
    path = save_checkpoint(tmp_path, first)
    told = [first.train_next() for _ in range(3)]
    second = build()
    load_checkpoint(path, second)
    assert [second.train_next() for _ in range(3)] == told
    assert fingerprint(second.policy_params()) == fingerprint(first.policy_params())
    assert fingerprint(second.optimizer_state) == fingerprint(first.optimizer_state)


def test_rows_without_a_trained_token_are_told_and_a_batch_of_them_is_a_version_without_update(
    config: DecoderConfig, params: Params
) -> None:
    rows = conversations()
    alone = PolicySettings(learning_rate=1e-2, batch_size=1)
    trainer = SupervisedTrainer(config, params, alone, rows)
    while trainer.plan.batch(trainer.version)[0] != 3:
        assert trainer.train_next().fates == ["trained"]
    before, updates = fingerprint(trainer.policy_params()), trainer.updates
    report = trainer.train_next()
    assert (report.fates, report.skipped, report.metrics["samples_masked"]) == (["masked"], False, 1.0)
    assert (fingerprint(trainer.policy_params()), trainer.updates) == (before, updates)


def test_an_update_that_is_not_finite_changes_nothing_but_the_version(config: DecoderConfig, params: Params) -> None:
    broken = {**params, "head": params["head"].at[0, 0].set(np.inf)}
    trainer = SupervisedTrainer(config, broken, SETTINGS, conversations())
    report = trainer.train_next()
    assert (report.version, report.skipped, report.metrics["update_skipped"]) == (1, True, 1.0)
    assert "loss" not in report.metrics
    assert fingerprint(trainer.policy_params()) == fingerprint(broken)


def test_every_row_comes_once_an_epoch_in_an_order_that_the_seed_decides() -> None:
    plan = Plan(rows=10, batch_size=4, seed=0)
    first, second = ([plan.batch(3 * epoch + i).tolist() for i in range(3)] for epoch in range(2))
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(10))
    assert first != second
    # Frozen: a job that goes on under a later version must meet the same rows.
    assert first == [[8, 0, 3, 7], [6, 4, 1, 5], [2, 9]]
    assert Plan(rows=10, batch_size=4, seed=1).batch(0).tolist() != first[0]


def test_a_cut_sequence_ends_with_its_last_trained_token() -> None:
    one = TokenSequence(ids=np.arange(8, dtype=np.int32), mask=np.array([0, 0, 1, 1, 0, 0, 1, 0], np.uint8))
    assert one.cut(99).ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert one.cut(6).ids.tolist() == [0, 1, 2, 3]
    assert one.cut(2).ids.tolist() == []
