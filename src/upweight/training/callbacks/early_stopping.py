"""Says when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from upweight.errors import ConfigError
from upweight.training.callbacks.base import BaseCallback, Logs


@dataclass(slots=True)
class EarlyStoppingConfig:
    monitor: str = "val_loss"
    min_delta: float = 0.0
    patience: int = 10  # so many values in a row without improvement
    mode: str = "min"  # min | max
    check_finite: bool = True  # stop at a value that is not finite
    stopping_threshold: float | None = None  # good enough: stop
    divergence_threshold: float | None = None  # as bad as this: stop

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if self.min_delta < 0 or self.patience < 0:
            raise ConfigError(f"min_delta is {self.min_delta} and patience {self.patience}; both must be at least 0")


class EarlyStopping(BaseCallback):
    """`should_stop` turns True, and stays so, when the monitored value has not improved, is good enough, or is lost.

    Looks at the logs of epochs, and at those of batches when the value is among them. The first value is the
    baseline; better means by more than `min_delta`. A log without the value counts as nothing.
    """

    __slots__ = ("best_score", "config", "should_stop", "stopped_epoch", "wait_count")

    def __init__(self, config: EarlyStoppingConfig | None = None) -> None:
        self.config = EarlyStoppingConfig() if config is None else config
        self.should_stop = False
        self.stopped_epoch = 0  # the epoch, or batch, whose value stopped the run
        self.best_score: float | None = None
        self.wait_count = 0

    def on_epoch_end(self, trainer: Any, epoch: int, logs: Logs) -> None:
        self._look(epoch, logs)

    def on_batch_end(self, trainer: Any, batch: int, logs: Logs) -> None:
        self._look(batch, logs)

    def _look(self, number: int, logs: Logs) -> None:
        if self.should_stop or self.config.monitor not in logs:
            return
        value = float(logs[self.config.monitor])
        if self._is_over(value):
            self.should_stop, self.stopped_epoch = True, number

    def _is_over(self, value: float) -> bool:
        config, sign = self.config, 1.0 if self.config.mode == "min" else -1.0
        if not math.isfinite(value):
            return config.check_finite or self._has_waited()
        if config.stopping_threshold is not None and sign * value <= sign * config.stopping_threshold:
            self._improved(value)
            return True
        if config.divergence_threshold is not None and sign * value >= sign * config.divergence_threshold:
            return True
        if self.best_score is None or sign * value < sign * self.best_score - config.min_delta:
            self._improved(value)
            return False
        return self._has_waited()

    def _improved(self, value: float) -> None:
        self.best_score, self.wait_count = value, 0

    def _has_waited(self) -> bool:
        self.wait_count += 1
        return self.wait_count >= self.config.patience


def check_mode(mode: str) -> None:
    if mode not in ("min", "max"):
        raise ConfigError(f"mode is {mode!r}; it must be 'min' or 'max'")
