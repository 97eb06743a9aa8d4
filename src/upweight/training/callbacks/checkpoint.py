"""Keeps the best models on disk."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from upweight.errors import ConfigError, TrainingError
from upweight.training.callbacks.base import BaseCallback, Logs
from upweight.training.callbacks.early_stopping import check_mode
from upweight.training.saved_folders import replace as replace_folder
from upweight.training.saved_folders import standing


@dataclass(slots=True)
class CheckpointConfig:
    dirpath: str | Path = "checkpoints"
    monitor: str = "val_loss"
    mode: str = "min"  # min | max
    save_top_k: int = 3  # -1 = all, 0 = none
    every_n_epochs: int = 1  # of epochs, or of batches whose logs hold the monitored value

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if self.save_top_k < -1:
            raise ConfigError(f"save_top_k is {self.save_top_k}; it must be -1 (all), 0 (none) or a number of models")
        if self.every_n_epochs < 1:
            raise ConfigError(f"every_n_epochs is {self.every_n_epochs}; it must be at least 1")


class Saved(NamedTuple):
    score: float
    path: Path


class ModelCheckpoint(BaseCallback):
    """Saves the model when the monitored value is among the `save_top_k` best, and removes what of its own no longer is.

    The model is that of the trainer; a loop without one gives it here. A folder of the final name is complete.
    """

    __slots__ = ("config", "model", "saved")

    def __init__(self, config: CheckpointConfig | None = None, *, model: Any = None) -> None:
        self.config = CheckpointConfig() if config is None else config
        self.model = model
        self.saved: list[Saved] = []  # best first

    @property
    def best_model_path(self) -> Path | None:
        return self.saved[0].path if self.saved else None

    @property
    def best_score(self) -> float | None:
        return self.saved[0].score if self.saved else None

    def on_epoch_end(self, trainer: Any, epoch: int, logs: Logs) -> None:
        self._look(trainer, "epoch", epoch, logs)

    def on_batch_end(self, trainer: Any, batch: int, logs: Logs) -> None:
        self._look(trainer, "batch", batch, logs)

    def _look(self, trainer: Any, kind: str, number: int, logs: Logs) -> None:
        config = self.config
        if config.save_top_k == 0 or config.monitor not in logs or (number + 1) % config.every_n_epochs:
            return
        score = float(logs[config.monitor])
        if not math.isfinite(score) or not self._is_among_the_best(score):
            return
        path = Path(config.dirpath).absolute() / f"{kind}-{number:06d}"
        save_model(path, self._model_of(trainer))
        self.saved = sorted([*(s for s in self.saved if s.path != path), Saved(score, path)], key=self._rank)
        if config.save_top_k > 0:
            for gone in self.saved[config.save_top_k :]:
                shutil.rmtree(gone.path)
            self.saved = self.saved[: config.save_top_k]

    def _rank(self, saved: Saved) -> float:
        return saved.score if self.config.mode == "min" else -saved.score

    def _is_among_the_best(self, score: float) -> bool:
        kept = self.config.save_top_k
        return kept == -1 or len(self.saved) < kept or self._rank(Saved(score, Path())) < self._rank(self.saved[-1])

    def _model_of(self, trainer: Any) -> Any:
        model = self.model if self.model is not None else getattr(trainer, "model", None)
        if model is None:
            raise ConfigError("ModelCheckpoint has no model to save; give it one: ModelCheckpoint(config, model=model)")
        return model


def save_model(path: str | Path, model: Any) -> None:
    """Writes the model's arrays; a folder that is there is replaced once the new one is complete."""
    import orbax.checkpoint as orbax  # slow to import

    from upweight.training.rl.state import snapshot

    with orbax.PyTreeCheckpointer() as checkpointer:
        replace_folder(Path(path).absolute(), lambda folder: checkpointer.save(folder, snapshot(model)))


def load_model(path: str | Path, model: Any) -> None:
    """Puts saved arrays into a model of the same form, in place; `TrainingError` when there are none or they do not fit."""
    import orbax.checkpoint as orbax

    from upweight.training.rl.state import restore, snapshot

    folder = standing(Path(path).absolute())
    if not folder.is_dir():
        raise TrainingError(f"{folder} holds no saved model; see ModelCheckpoint.best_model_path")
    mine = snapshot(model)
    with orbax.PyTreeCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder).item_metadata.tree
        if set(saved) != set(mine):
            name = min(set(saved) ^ set(mine))
            raise TrainingError(f"{folder} is of another model: {name} is in only one of them")
        arguments = orbax.checkpoint_utils.construct_restore_args(mine)
        restore(model, checkpointer.restore(folder, item=mine, restore_args=arguments))
