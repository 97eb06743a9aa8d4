"""Small inputs that mean nothing: each gets one line of ours, which names what is wrong."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.rl import small, trainers
from tests.training.rl.small import MASK, RESPONSE, REWARDS, Policy, grouped
from tests.training.rl.trainers import ALL, OLD, OTHER
from upweight.errors import UpweightError
from upweight.training import (
    DPOConfig,
    DPOTrainer,
    GeneratedSequenceBatch,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    PreferenceBatch,
    REINFORCEConfig,
    REINFORCETrainer,
    SFTConfig,
    SFTTrainer,
    save_state,
)
from upweight.training.rl import (
    GroupRolloutBatch,
    SequenceRolloutBatch,
    compute_clipped_surrogate_loss,
)
from upweight.training.rl.types import canonicalize_response_mask

NAN_MASK = np.where(RESPONSE > 0, 1.0, np.nan)


def no_rows() -> GeneratedSequenceBatch:
    return GeneratedSequenceBatch.from_sequences(np.zeros((0, 7), np.int32), rewards=np.zeros(0))


def made(kind: type, config: Any) -> Any:
    model = Policy(critic=True)
    between = (Policy(1),) if kind is DPOTrainer else ()
    return kind(model, *between, small.optimizer(model), config)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "groups of none": (lambda: trainers.grpo().trainer.normalize_group_rewards(REWARDS, 0), "group_size is 0"),
    "groups of a half": (lambda: GroupRolloutBatch(small.rollout(), 0.5), "group_size is 0.5, it must be a whole"),
    "no rollout": (
        lambda: trainers.reinforce().trainer.train_step(SequenceRolloutBatch(no_rows())),
        "at least one row",
    ),
    "no answers": (lambda: trainers.sft().trainer.train_step(no_rows()), "at least one row"),
    "no pairs": (
        lambda: trainers.dpo().trainer.train_step(PreferenceBatch(no_rows(), no_rows())),
        r"chosen.sequences has shape \(0, 7\)",
    ),
    "parts": (
        lambda: trainers.sft().trainer.train_step(small.answers(), num_microbatches=1.5),
        "num_microbatches is 1.5, it must be a whole number",
    ),
    "minibatch": (
        lambda: trainers.ppo().trainer.update(trainers.batch_for("ppo"), minibatch_size=2.5),
        "minibatch_size is 2.5",
    ),
    "epochs": (lambda: trainers.ppo().trainer.update(trainers.batch_for("ppo"), epochs=True), "epochs is True"),
    "lengths": (
        lambda: compute_clipped_surrogate_loss([0.0, 1.0], [0.0], [1.0, 1.0], 0.2),
        r"old_log_probs has shape \(1,\), it must be \(2,\)",
    ),
    "response": (lambda: small.answers(response_mask=NAN_MASK), "response_mask holds NaN"),
    "prompt": (lambda: small.answers(prompt_mask=NAN_MASK), "prompt_mask holds NaN"),
    "actions": (lambda: canonicalize_response_mask(small.tokens(), NAN_MASK[:, 1:]), "response_mask holds NaN"),
    "valid": (lambda: small.rollout(valid=np.array([1, np.nan, 1, 1])), "valid holds NaN"),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_line_names_what_is_wrong(name: str) -> None:
    attempt, message = WRONG[name]
    with pytest.raises(UpweightError, match=message) as caught:
        attempt()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (SFTTrainer, GRPOConfig()),
        (GRPOTrainer, {"beta": 0}),
        (DPOTrainer, SFTConfig()),
        (PPOTrainer, DPOConfig()),
        (REINFORCETrainer, PPOConfig()),
    ],
)
def test_a_config_of_another_trainer_is_refused(kind: type, config: Any) -> None:
    with pytest.raises(ValueError, match=f"config is a {type(config).__name__}; {kind.__name__} takes a "):
        made(kind, config)


def test_a_cursor_whose_keys_would_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cursor has the key 1, which JSON holds as text only; use '1'"):
        save_state(tmp_path, trainers.sft().trainer, cursor={"read": [{1: 2}]})
    assert not any(tmp_path.iterdir())


def test_numbers_of_numpy_are_numbers() -> None:
    config = GRPOConfig(
        num_generations=np.int64(2),  # type: ignore[arg-type]
        clip_param=np.float32(0.25),  # type: ignore[arg-type]
        kl_in_reward=np.bool_(True),  # type: ignore[arg-type]
        is_mask=np.array([0.5, 2.0]),  # type: ignore[arg-type]
    )
    plain = GRPOConfig(num_generations=2, clip_param=0.25, kl_in_reward=True, is_mask=(0.5, 2.0))
    assert config == plain
    assert {type(value) for value in asdict(config).values()} <= {int, float, bool, str, tuple, type(None)}
    assert REINFORCEConfig(gamma=np.float64(0.5)).gamma == 0.5
    with pytest.raises(ValueError, match="num_generations is 0"):
        GRPOConfig(num_generations=np.int64(0))  # type: ignore[arg-type]


def test_lists_are_arrays() -> None:
    assert float(compute_clipped_surrogate_loss([0.0, 0.0], [0.0, 0.0], [1.0, 3.0], 0.2)) == -2.0


def test_batches_of_different_fields_are_accumulated() -> None:
    """A metric is over the batches that it applies to."""
    trainer = trainers.grpo(beta=0.0, entropy_coeff=0.0).trainer
    plain, explicit = grouped(old_log_probs=OLD), grouped(old_log_probs=OLD, advantages=OTHER)
    alone = {name: float(x) for name, x in trainer.eval_step(plain)[1].items()}
    for batches in ([plain, explicit], [explicit, plain]):
        _, metrics = trainer.train_step_accumulated(batches)
        assert float(metrics["zero_variance_groups"]) == alone["zero_variance_groups"]
        assert float(metrics["num_tokens"]) == 2 * MASK.sum()


def test_every_kind_takes_its_defaults() -> None:
    kinds = (REINFORCETrainer, PPOTrainer, GRPOTrainer, DPOTrainer, SFTTrainer)
    assert [type(made(kind, None).config).__name__.removesuffix("Config") for kind in kinds] == [
        name.upper() for name in ALL
    ]
