"""Metrics of a loop to a logger, a file or a tracker. Trackers are imported when the first metric comes."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
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
    """A file with one JSON object a line: step and metrics. For `LoggerCallback`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def log_scalars(self, metrics: Mapping[str, float], step: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


@dataclass(slots=True)
class WandbLoggerConfig:
    project: str
    entity: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    mode: str = "online"  # online | offline | disabled
    resume: str | bool | None = None
    log_every_n_steps: int = 1
    log_on_epoch_end: bool = True
    log_dir: str | Path | None = None

    def __post_init__(self) -> None:
        check_every(self.log_every_n_steps)


class WandbLoggerCallback(MetricCallback):
    """To Weights & Biases. The run begins with training, or with the first metric, and ends with training or `close()`."""

    __slots__ = ("config", "run")

    def __init__(self, config: WandbLoggerConfig) -> None:
        super().__init__(config.log_every_n_steps, config.log_on_epoch_end)
        self.config = config
        self.run: Any = None

    def on_train_begin(self, trainer: Any) -> None:
        self._start()

    def on_train_end(self, trainer: Any) -> None:
        self.close()

    def write(self, metrics: dict[str, float], step: int) -> None:
        self._start()
        self.run.log(metrics, step=step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None

    def _start(self) -> None:
        if self.run is not None:
            return
        given = self.config
        self.run = tracker_module("wandb", "wandb").init(
            project=given.project,
            entity=given.entity,
            name=given.name,
            tags=given.tags,
            notes=given.notes,
            config=given.config,
            mode=given.mode,
            resume=given.resume,
            dir=None if given.log_dir is None else str(given.log_dir),
        )


@dataclass(slots=True)
class TensorBoardLoggerConfig:
    log_dir: str | Path = "logs/tensorboard"
    flush_secs: int = 120
    max_queue: int = 10
    log_every_n_steps: int = 1
    log_on_epoch_end: bool = True

    def __post_init__(self) -> None:
        check_every(self.log_every_n_steps)


class TensorBoardLoggerCallback(MetricCallback):
    """To event files that TensorBoard reads, written by tensorboardX."""

    __slots__ = ("config", "writer")

    def __init__(self, config: TensorBoardLoggerConfig | None = None) -> None:
        self.config = TensorBoardLoggerConfig() if config is None else config
        super().__init__(self.config.log_every_n_steps, self.config.log_on_epoch_end)
        self.writer: Any = None

    def on_train_end(self, trainer: Any) -> None:
        self.close()

    def write(self, metrics: dict[str, float], step: int) -> None:
        if self.writer is None:
            module = tracker_module("tensorboardX", "tensorboardX")
            given = self.config
            self.writer = module.SummaryWriter(
                str(given.log_dir), flush_secs=given.flush_secs, max_queue=given.max_queue
            )
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def tracker_module(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{name} is not installed; run: pip install {package}") from error
