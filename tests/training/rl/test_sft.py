"""Supervised fine-tuning against an independent float64 reference, its properties and its refusals."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.training.rl import small, trainers
from tests.training.rl.small import MASK, RESPONSE, Arrays, Bigram, HeadPolicy, Policy, answers, optimizer, tokens
from tests.training.rl.trainers import assert_same, step_of
from upweight.training import SFTConfig, SFTTrainer


def cross_entropy(p: Arrays) -> float:
    return -float((small.log_probs_of(small.logits_of(p, tokens()), tokens()) * MASK).sum() / MASK.sum())


def test_loss_gradient_and_accuracy() -> None:
    model = Policy()
    logits = small.logits_of(small.arrays(model), tokens())[:, :-1]
    right = ((logits.argmax(-1) == tokens()[:, 1:]) * MASK).sum()
    assert 0 < right < 13
    metrics = small.check_step(SFTTrainer(model, optimizer(model, 1.0)), answers(), cross_entropy)
    assert metrics["token_accuracy"] == pytest.approx(right / 13)
    assert metrics["num_tokens"] == 13
    assert set(metrics) == {"loss", "token_accuracy", "num_tokens", "grad_norm", "update_skipped"}


def test_padding_side_and_row_order_do_not_matter() -> None:
    def case(ids: Any, response: Any) -> trainers.Case:
        return trainers.Case(
            SFTTrainer(model := Bigram(), optimizer(model)), answers(sequences=ids, response_mask=response)
        )

    ids, nothing = tokens(), np.zeros((4, 3), np.int32)
    right = step_of(case(np.hstack([ids, nothing]), np.hstack([RESPONSE, nothing])))
    left = step_of(case(np.hstack([nothing, ids]), np.hstack([nothing, RESPONSE])))
    turned = step_of(case(np.hstack([ids, nothing])[::-1], np.hstack([RESPONSE, nothing])[::-1]))
    for other in (left, turned):
        assert other[0] == pytest.approx(right[0], rel=1e-6)
        assert_same(other[1], right[1], rtol=1e-6)


def test_the_chunked_head_of_many_tokens() -> None:
    """More trained tokens than a chunk holds."""
    ids = tokens(40, 9)
    batch = answers(sequences=ids, response_mask=np.ones(ids.shape, np.float32))
    results = []
    for kind in (Policy, HeadPolicy):
        results.append(step_of(trainers.Case(SFTTrainer(model := kind(), optimizer(model)), batch)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert_same(results[1][1], results[0][1], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_trained_on_is_refused() -> None:
    trainer = trainers.sft().trainer
    first = np.zeros_like(RESPONSE)
    first[:, 0] = 1  # nothing precedes it
    with pytest.raises(ValueError, match="response_mask has 0 trainable tokens"):
        trainer.train_step(answers(response_mask=first))
    with pytest.raises(TypeError, match="SFTTrainer got a SequenceRolloutBatch"):
        trainer.train_step(small.rollout())
    with pytest.raises(TypeError, match="integer token ids"):
        trainer.train_step(answers(sequences=tokens().astype(np.float32)))
    with pytest.raises(ValueError, match=r"SFTConfig.max_grad_norm is -1"):
        SFTConfig(max_grad_norm=-1)


class OnlyLogProbs:
    """An adapter of others that tells no distributions."""

    def __init__(self, model: Policy) -> None:
        self.model = model

    def bind(self, model: Policy) -> "OnlyLogProbs":
        return OnlyLogProbs(model)

    def action_log_probs(self, batch: Any) -> jax.Array:
        return trainers.SFTTrainer(self.model, None).policy_adapter.action_log_probs(batch)


def test_accuracy_is_absent_where_it_is_not_known() -> None:
    model = Policy()
    trainer = SFTTrainer(model, optimizer(model), policy_adapter=OnlyLogProbs(model))
    metrics, _ = step_of(trainers.Case(trainer, answers()))
    assert metrics["loss"] == pytest.approx(cross_entropy(small.arrays(Policy())), rel=1e-5)
    assert "token_accuracy" not in metrics
