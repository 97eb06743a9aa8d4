"""A line that shows how training goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from upweight.training.callbacks.base import BaseCallback, Logs
from upweight.training.callbacks.loggers import numbers_of


@dataclass(slots=True)
class ProgressBarConfig:
    show_eta: bool = True
    show_metrics: bool = True
    leave: bool = True  # the line stays when training ended
    disable: bool = False


class ProgressBarCallback(BaseCallback):
    """Counts steps, with the time taken and the latest metrics. With a `total` it knows how long is left.

    The line begins with the first hook and ends with `on_train_end` or `close()`.
    """

    __slots__ = ("_bar", "_task", "config", "total")

    def __init__(self, config: ProgressBarConfig | None = None, *, total: int | None = None) -> None:
        self.config = ProgressBarConfig() if config is None else config
        self.total = total
        self._bar: Any = None
        self._task: Any = None

    def on_batch_end(self, trainer: Any, batch: int, logs: Logs) -> None:
        if self.config.disable:
            return
        self._start()
        shown = numbers_of(logs) if self.config.show_metrics else {}
        text = "  ".join(f"{name} {value:.4g}" for name, value in list(shown.items())[:4])
        self._bar.update(self._task, advance=1, metrics=text)

    def on_train_end(self, trainer: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start(self) -> None:
        if self._bar is not None:
            return
        from rich import progress

        columns: list[Any] = [progress.TextColumn("step"), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()]
        if self.config.show_eta and self.total is not None:
            columns.append(progress.TimeRemainingColumn())
        columns.append(progress.TextColumn("{task.fields[metrics]}"))
        self._bar = progress.Progress(*columns, transient=not self.config.leave)
        self._task = self._bar.add_task("steps", total=self.total, metrics="")
        self._bar.start()
