"""One trainer of each kind with a batch for it, for properties that all have."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.training.rl import small
from upweight.training.rl import (
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
)

OTHER = np.cos(np.arange(24, dtype=np.float32)).reshape(4, 6)


class Case(NamedTuple):
    trainer: Any
    batch: Any


def pairs(rejected_seed: int = 3) -> PreferenceBatch[GeneratedSequenceBatch]:
    make = GeneratedSequenceBatch.from_sequences
    return PreferenceBatch(
        make(small.tokens(), response_mask=small.RESPONSE),
        make(small.tokens(seed=rejected_seed), response_mask=small.RESPONSE),
    )


def reinforce(model: Any = None, **config: Any) -> Case:
    model = model or small.Policy()
    return Case(
        REINFORCETrainer(model, small.optimizer(model), REINFORCEConfig(**config)), small.rollout(rewards=small.REWARDS)
    )


def ppo(model: Any = None, **config: Any) -> Case:
    model = model or small.Policy(critic=True)
    batch = small.rollout(old_log_probs=OLD, advantages=OTHER, returns=2 * OTHER, values=OTHER[:, ::-1].copy())
    return Case(PPOTrainer(model, small.optimizer(model), PPOConfig(**config)), batch)


def grpo(model: Any = None, reference: Any = None, **config: Any) -> Case:
    model = model or small.Policy()
    settings = GRPOConfig(**{"num_generations": 2, **config})
    trainer = GRPOTrainer(model, small.optimizer(model), settings, reference_model=reference or small.Policy(1))
    return Case(trainer, small.grouped(old_log_probs=OLD, sampler_log_probs=OLD[:, ::-1].copy()))


def dpo(model: Any = None, reference: Any = None, **config: Any) -> Case:
    model = model or small.Policy()
    trainer = DPOTrainer(model, reference or small.Policy(1), small.optimizer(model), DPOConfig(**config))
    return Case(trainer, pairs())


OLD = small.old_log_probs(small.Policy())
ALL: dict[str, Callable[..., Case]] = {"reinforce": reinforce, "ppo": ppo, "grpo": grpo, "dpo": dpo}


def step_of(case: Case, batch: Any = None, **options: Any) -> tuple[dict[str, float], list[np.ndarray]]:
    """Metrics of a step and the parameters after it."""
    _, metrics = case.trainer.train_step(case.batch if batch is None else batch, **options)
    return {name: float(x) for name, x in metrics.items()}, small.params(case.trainer.model)


def assert_same(a: list[np.ndarray], b: list[np.ndarray], rtol: float = 1e-5, atol: float = 1e-7) -> None:
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
