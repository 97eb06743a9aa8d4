"""What a callback is, and the list that calls several in order.

The documented RL loop calls `on_batch_begin(None, step)` and `on_batch_end(None, step, metrics)` and nothing else: every callback
works with `trainer=None` and from these two hooks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

Logs = Mapping[str, Any]


@runtime_checkable
class TrainerLike(Protocol):
    @property
    def model(self) -> Any: ...


@runtime_checkable
class TrainingCallback(Protocol):
    def on_train_begin(self, trainer: Any) -> None: ...
    def on_train_end(self, trainer: Any) -> None: ...
    def on_epoch_begin(self, trainer: Any, epoch: int) -> None: ...
    def on_epoch_end(self, trainer: Any, epoch: int, logs: Logs) -> None: ...
    def on_batch_begin(self, trainer: Any, batch: int) -> None: ...
    def on_batch_end(self, trainer: Any, batch: int, logs: Logs) -> None: ...
    def on_validation_begin(self, trainer: Any) -> None: ...
    def on_validation_end(self, trainer: Any, logs: Logs) -> None: ...


class BaseCallback:
    """Does nothing; subclasses override what they need."""

    __slots__ = ()

    def on_train_begin(self, trainer: Any) -> None:
        """Before the first epoch."""

    def on_train_end(self, trainer: Any) -> None:
        """After the last one."""

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        """Before the first batch of an epoch."""

    def on_epoch_end(self, trainer: Any, epoch: int, logs: Logs) -> None:
        """After its last batch, with the epoch's metrics."""

    def on_batch_begin(self, trainer: Any, batch: int) -> None:
        """Before a step."""

    def on_batch_end(self, trainer: Any, batch: int, logs: Logs) -> None:
        """After a step, with its metrics."""

    def on_validation_begin(self, trainer: Any) -> None:
        """Before a validation."""

    def on_validation_end(self, trainer: Any, logs: Logs) -> None:
        """After it, with its metrics."""


class CallbackList:
    """Calls its callbacks in the order in which they were added."""

    __slots__ = ("callbacks",)

    def __init__(self, callbacks: Iterable[TrainingCallback] | None = None) -> None:
        self.callbacks: list[TrainingCallback] = list(callbacks or ())

    def add(self, callback: TrainingCallback) -> None:
        self.callbacks.append(callback)

    def remove(self, callback: TrainingCallback) -> None:
        self.callbacks.remove(callback)

    def __len__(self) -> int:
        return len(self.callbacks)

    def __iter__(self) -> Iterator[TrainingCallback]:
        return iter(self.callbacks)

    def on_train_begin(self, trainer: Any) -> None:
        for callback in self.callbacks:
            callback.on_train_begin(trainer)

    def on_train_end(self, trainer: Any) -> None:
        for callback in self.callbacks:
            callback.on_train_end(trainer)

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        for callback in self.callbacks:
            callback.on_epoch_begin(trainer, epoch)

    def on_epoch_end(self, trainer: Any, epoch: int, logs: Logs) -> None:
        for callback in self.callbacks:
            callback.on_epoch_end(trainer, epoch, logs)

    def on_batch_begin(self, trainer: Any, batch: int) -> None:
        for callback in self.callbacks:
            callback.on_batch_begin(trainer, batch)

    def on_batch_end(self, trainer: Any, batch: int, logs: Logs) -> None:
        for callback in self.callbacks:
            callback.on_batch_end(trainer, batch, logs)

    def on_validation_begin(self, trainer: Any) -> None:
        for callback in self.callbacks:
            callback.on_validation_begin(trainer)

    def on_validation_end(self, trainer: Any, logs: Logs) -> None:
        for callback in self.callbacks:
            callback.on_validation_end(trainer, logs)
