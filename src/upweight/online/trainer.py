"""The loop in one process: rollout → update → the engine swaps to the new weights.

Invariants
- The engine draws from the trainer's weights, before the first step and after each one; a fingerprint proves it.
- A method that compares the responses of a prompt gets at least two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from upweight.errors import ConfigError, TrainingError
from upweight.inference import InferenceScheduler
from upweight.online.batches import check_transform, train_batch
from upweight.online.data import RolloutResult
from upweight.online.load_check import check_loaded
from upweight.online.runner import RolloutRunner
from upweight.training.policy_trainer import PolicyTrainer
from upweight.weights.fingerprint import fingerprint


@dataclass(frozen=True, kw_only=True)
class OnlineStep:
    """What one step did."""

    version: int  # of the weights that the engine draws from now on
    is_fresh: bool  # False: the rollout was replayed
    reward_mean: float  # of the valid responses
    result: RolloutResult
    metrics: dict[str, float]  # of the trainer, and zero_variance_groups, invalid_responses


class OnlineTrainer:
    """`trainer.train(batch)` makes one optimizer step on the batch's rollout, fresh or replayed.

    The trainer must have the model's shape; its weights are handed to the engine at once, and the first thing done is to
    compare both on a few tokens. `ConfigError` for rollouts whose distribution a trainer cannot compute again, and for
    groups of one with a method that compares within the group.
    """

    def __init__(self, runner: RolloutRunner, trainer: PolicyTrainer) -> None:
        generator = runner.generator
        check_transform(generator.transform)
        settings = trainer.settings
        if settings.compares_groups and generator.group_size == 1:
            raise ConfigError(
                f"group_size is 1, but {settings.algorithm} compares the responses of a prompt with each other: "
                "use a group_size of at least 2, or advantage 'given'"
            )
        self.runner = runner
        self.trainer = trainer
        self._hand_over()
        check_loaded(self.scheduler.engine, trainer)

    @property
    def scheduler(self) -> InferenceScheduler:
        return self.runner.generator.scheduler

    def train(self, batch: Mapping[str, Any]) -> OnlineStep:
        result, is_fresh = self.runner(batch)
        report = self.trainer.train(train_batch(result))
        self._hand_over()
        self.runner.step()
        valid = np.asarray(result.response_mask).any(-1)
        counts = {"zero_variance_groups": result.zero_variance_groups, "invalid_responses": int((~valid).sum())}
        return OnlineStep(
            version=report.version,
            is_fresh=is_fresh,
            reward_mean=float(np.asarray(result.rewards)[valid].mean()),
            result=result,
            metrics=report.metrics | {name: float(count) for name, count in counts.items()},
        )

    def _hand_over(self) -> None:
        params = self.scheduler.placed(self.trainer.policy_params())
        found = self.scheduler.set_weights(params, self.trainer.version)
        if found != (meant := fingerprint(params)):
            raise TrainingError(
                f"the engine has the weights {found} instead of {meant} of version {self.trainer.version}"
            )
