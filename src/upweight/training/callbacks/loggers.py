"""Metrics of a loop to a logger or a file; `trackers` has the other places."""

from __future__ import annotations

import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upweight.errors import BatchTypeError, ConfigError
from upweight.training.callbacks.base import BaseCallback, Logs

Write = Callable[[dict[str, float], int], None]


@dataclass(slots=True)
class LoggerCallbackConfig:
    log_every_n_steps: int = 1
    log_on_epoch_end: bool = True
    prefix: str = ""

    def __post_init__(self) -> None:
        check_every(self.log_every_n_steps)


def check_every(steps: int) -> None:
    if steps < 1:
        raise ConfigError(f"log_every_n_steps is {steps}; it must be at least 1")


def numbers_of(logs: Logs, prefix: str = "") -> dict[str, float]:
    """The scalars among the logs as floats."""
    found = {}
    for name, value in logs.items():
        if isinstance(value, int | float) or (getattr(value, "shape", None) == () and not isinstance(value, str)):
            found[prefix + name] = float(value)
    return found


class MetricCallback(BaseCallback, ABC):
    """Base of what writes metrics: every n-th step, counted from the first, and at the end of epochs and validations."""

    __slots__ = ("_every", "_on_epoch_end", "_prefix", "steps")

    def __init__(self, every: int, on_epoch_end: bool, prefix: str = "") -> None:
        self._every, self._on_epoch_end, self._prefix = every, on_epoch_end, prefix
        self.steps = 0  # steps that ended

    @abstractmethod
    def write(self, metrics: dict[str, float], step: int) -> None:
        """The numbers of a step."""

    def on_batch_end(self, trainer: Any, batch: int, logs: Logs) -> None:
        if self.steps % self._every == 0:
            self.write(numbers_of(logs, self._prefix), self.steps)
        self.steps += 1

    def on_epoch_end(self, trainer: Any, epoch: int, logs: Logs) -> None:
        if self._on_epoch_end:
            self.write(numbers_of(logs, self._prefix), self.steps)

    def on_validation_end(self, trainer: Any, logs: Logs) -> None:
        self.write(numbers_of(logs, self._prefix), self.steps)


class LoggerCallback(MetricCallback):
    """Hands metrics to a logger that has `log_scalars(metrics, step)`, `log_scalar(name, value, step)` or
    `log(metrics, step=…)`, to a `logging.Logger`, or to a function of metrics and step."""

    __slots__ = ("_write", "logger")

    def __init__(self, logger: Any, config: LoggerCallbackConfig | None = None) -> None:
        config = LoggerCallbackConfig() if config is None else config
        super().__init__(config.log_every_n_steps, config.log_on_epoch_end, config.prefix)
        self.logger = logger
        self._write = _writer(logger)

    def write(self, metrics: dict[str, float], step: int) -> None:
        self._write(metrics, step)


def _writer(logger: Any) -> Write:
    if isinstance(logger, logging.Logger):
        return lambda metrics, step: logger.info("step %d %s", step, _line(metrics))
    if callable(getattr(logger, "log_scalars", None)):
        return lambda metrics, step: logger.log_scalars(metrics, step)
    if callable(getattr(logger, "log_scalar", None)):
        return _one_by_one(logger.log_scalar)
    if callable(getattr(logger, "log", None)):
        return lambda metrics, step: logger.log(metrics, step=step)
    if callable(logger):
        return logger
    raise BatchTypeError(f"a {type(logger).__name__} has no log_scalars, log_scalar or log, and can't be called")


def _one_by_one(log_scalar: Callable[[str, float, int], Any]) -> Write:
    def write(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            log_scalar(name, value, step)

    return write


def _line(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in metrics.items())


class JsonlLogger:
    """A file with one JSON object a line: step and metrics, without those that are not finite, which JSON can't write. For
    `LoggerCallback`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def log_scalars(self, metrics: Mapping[str, float], step: int) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
