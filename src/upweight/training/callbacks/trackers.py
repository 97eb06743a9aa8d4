"""Metrics of a loop to experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio.

Each is an extra of this package and is imported when its run begins, with training or the first metric.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from upweight.errors import ConfigError
from upweight.training.callbacks.base import CallbackList, TrainingCallback
from upweight.training.callbacks.loggers import JsonlLogger, LoggerCallback, MetricCallback, check_every


def tracked(folder: str | Path, *trackers: TrainingCallback) -> CallbackList:
    """Callbacks that always write `metrics.jsonl` in `folder`, which needs no tracker, and then call the given ones."""
    return CallbackList([LoggerCallback(JsonlLogger(Path(folder) / "metrics.jsonl")), *trackers])


class TrackerCallback(MetricCallback):
    """Base of what has a run: it begins with training, or with the first metric, and ends with training or `close()`."""

    __slots__ = ("config", "run")

    def __init__(self, config: Any) -> None:
        super().__init__(config.log_every_n_steps, config.log_on_epoch_end)
        self.config = config
        self.run: Any = None

    @abstractmethod
    def start(self) -> Any:
        """The tracker's own run."""

    @abstractmethod
    def send(self, run: Any, metrics: dict[str, float], step: int) -> None:
        """The numbers of a step to it."""

    @abstractmethod
    def finish(self, run: Any) -> None:
        """Everything is written."""

    def on_train_begin(self, trainer: Any) -> None:
        self._begin()

    def on_train_end(self, trainer: Any) -> None:
        self.close()

    def write(self, metrics: dict[str, float], step: int) -> None:
        self.send(self._begin(), metrics, step)

    def close(self) -> None:
        if self.run is not None:
            self.finish(self.run)
            self.run = None

    def _begin(self) -> Any:
        if self.run is None:
            self.run = self.start()
        return self.run


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
    run_id: str | None = None  # with `resume`, the run to go on with

    def __post_init__(self) -> None:
        check_every(self.log_every_n_steps)


class WandbLoggerCallback(TrackerCallback):
    """To Weights & Biases; `mode="offline"` keeps the run on disk, for `wandb sync` later."""

    __slots__ = ()

    def __init__(self, config: WandbLoggerConfig) -> None:
        super().__init__(config)

    def start(self) -> Any:
        given = self.config
        return tracker_module("wandb", "wandb").init(
            project=given.project,
            entity=given.entity,
            name=given.name,
            tags=given.tags,
            notes=given.notes,
            config=given.config,
            mode=given.mode,
            resume=given.resume,
            id=given.run_id,
            dir=None if given.log_dir is None else str(given.log_dir),
        )

    def send(self, run: Any, metrics: dict[str, float], step: int) -> None:
        run.log(metrics, step=step)

    def finish(self, run: Any) -> None:
        run.finish()


@dataclass(slots=True)
class TensorBoardLoggerConfig:
    log_dir: str | Path = "logs/tensorboard"
    flush_secs: int = 120
    max_queue: int = 10
    log_every_n_steps: int = 1
    log_on_epoch_end: bool = True

    def __post_init__(self) -> None:
        check_every(self.log_every_n_steps)


class TensorBoardLoggerCallback(TrackerCallback):
    """To event files that TensorBoard reads, written by tensorboardX."""

    __slots__ = ()

    def __init__(self, config: TensorBoardLoggerConfig | None = None) -> None:
        super().__init__(TensorBoardLoggerConfig() if config is None else config)

    def start(self) -> Any:
        given = self.config
        writer = tracker_module("tensorboardX", "tensorboard").SummaryWriter
        return writer(str(given.log_dir), flush_secs=given.flush_secs, max_queue=given.max_queue)

    def send(self, run: Any, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            run.add_scalar(name, value, step)

    def finish(self, run: Any) -> None:
        run.close()


@dataclass(slots=True)
class MlflowLoggerConfig:
    experiment: str
    tracking_uri: str | None = None  # a server, or sqlite:///runs.db; None = as MLFLOW_TRACKING_URI says
    name: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    log_every_n_steps: int = 1
    log_on_epoch_end: bool = True
    run_id: str | None = None  # the run to go on with; None = a new one

    def __post_init__(self) -> None:
        check_every(self.log_every_n_steps)


class MlflowLoggerCallback(TrackerCallback):
    """To an MLflow experiment, which is made when it is not there. MLflow's active run is neither used nor changed."""

    __slots__ = ("_client",)

    def __init__(self, config: MlflowLoggerConfig) -> None:
        super().__init__(config)
        self._client: Any = None

    def start(self) -> Any:
        given = self.config
        self._client = client = tracker_module("mlflow", "mlflow").MlflowClient(given.tracking_uri)
        if given.run_id is not None:
            client.update_run(given.run_id, status="RUNNING")
            return client.get_run(given.run_id)
        found = client.get_experiment_by_name(given.experiment)
        experiment = client.create_experiment(given.experiment) if found is None else found.experiment_id
        run = client.create_run(experiment, run_name=given.name, tags=given.tags)
        for name, value in given.params.items():
            client.log_param(run.info.run_id, name, value)
        return run

    def send(self, run: Any, metrics: dict[str, float], step: int) -> None:
        make, now = tracker_module("mlflow.entities", "mlflow").Metric, int(time.time() * 1000)
        rows = [make(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(run.info.run_id, metrics=rows)

    def finish(self, run: Any) -> None:
        self._client.set_terminated(run.info.run_id)


@dataclass(slots=True)
class TrackioLoggerConfig:
    project: str
    name: str | None = None
    group: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    resume: str = "never"  # never | allow | must
    log_every_n_steps: int = 1
    log_on_epoch_end: bool = True

    def __post_init__(self) -> None:
        check_every(self.log_every_n_steps)


class TrackioLoggerCallback(TrackerCallback):
    """To trackio's local store, which lies where the variable TRACKIO_DIR says."""

    __slots__ = ()

    def __init__(self, config: TrackioLoggerConfig) -> None:
        super().__init__(config)

    def start(self) -> Any:
        given = self.config
        return tracker_module("trackio", "trackio").init(
            project=given.project,
            name=given.name,
            group=given.group,
            config=given.config,
            resume=given.resume,
            embed=False,
        )

    def send(self, run: Any, metrics: dict[str, float], step: int) -> None:
        run.log(metrics, step=step)

    def finish(self, run: Any) -> None:
        run.finish()


def tracker_module(name: str, extra: str) -> Any:
    """The module; `ConfigError` naming the extra when it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != name.split(".")[0]:
            raise  # something that the tracker itself needs
        raise ConfigError(f"{name} is not installed; run: pip install 'upweight[{extra}]'") from error
