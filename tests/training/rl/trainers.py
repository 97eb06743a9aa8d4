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
    SFTConfig,
    SFTTrainer,
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
    return _made("reinforce", model, None, config)


def ppo(model: Any = None, **config: Any) -> Case:
    return _made("ppo", model, None, config)


def grpo(model: Any = None, reference: Any = None, **config: Any) -> Case:
    return _made("grpo", model, reference, config)


def dpo(model: Any = None, reference: Any = None, **config: Any) -> Case:
    return _made("dpo", model, reference, config)


def sft(model: Any = None, **config: Any) -> Case:
    return _made("sft", model, None, config)


_KEPT: dict[Any, tuple[Any, Any]] = {}


def _made(kind: str, model: Any, reference: Any, config: dict[str, Any]) -> Case:
    """A trainer at its start. One on the usual models is kept and reset, with the programs that it compiled."""
    if model is not None or reference is not None:
        return Case(_trainer(kind, model, reference, config), batch_for(kind))
    key = (kind, *sorted(config.items()))
    if key not in _KEPT:
        trainer = _trainer(kind, None, None, config)
        _KEPT[key] = trainer, trainer.state_dict()
    trainer, start = _KEPT[key]
    trainer.load_state_dict(start)
    return Case(trainer, batch_for(kind))


def _trainer(kind: str, model: Any, reference: Any, config: dict[str, Any]) -> Any:
    model = model or small.Policy(critic=kind == "ppo")
    reference = reference or small.Policy(1)
    optimizer = small.optimizer(model)
    if kind == "reinforce":
        return REINFORCETrainer(model, optimizer, REINFORCEConfig(**config))
    if kind == "ppo":
        return PPOTrainer(model, optimizer, PPOConfig(**config))
    if kind == "sft":
        return SFTTrainer(model, optimizer, SFTConfig(**config))
    if kind == "grpo":
        settings = GRPOConfig(**{"num_generations": 2, **config})
        return GRPOTrainer(model, optimizer, settings, reference_model=reference)
    return DPOTrainer(model, reference, optimizer, DPOConfig(**config))


def batch_for(kind: str) -> Any:
    if kind == "reinforce":
        return small.rollout(rewards=small.REWARDS)
    if kind == "ppo":
        return small.rollout(old_log_probs=OLD, advantages=OTHER, returns=2 * OTHER, values=OTHER[:, ::-1].copy())
    if kind == "grpo":
        return small.grouped(old_log_probs=OLD, sampler_log_probs=OLD[:, ::-1].copy())
    return small.answers() if kind == "sft" else pairs()


OLD = small.old_log_probs(small.Policy())
ALL: dict[str, Callable[..., Case]] = {"reinforce": reinforce, "ppo": ppo, "grpo": grpo, "dpo": dpo, "sft": sft}


def step_of(case: Case, batch: Any = None, **options: Any) -> tuple[dict[str, float], list[np.ndarray]]:
    """Metrics of a step and the parameters after it."""
    _, metrics = case.trainer.train_step(case.batch if batch is None else batch, **options)
    return {name: float(x) for name, x in metrics.items()}, small.params(case.trainer.model)


def assert_same(a: list[np.ndarray], b: list[np.ndarray], rtol: float = 1e-5, atol: float = 1e-7) -> None:
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
