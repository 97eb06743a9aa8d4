"""Draws tasks from the dataset in a thread of its own, so that a slow dataset delays nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from queue import Queue, SimpleQueue
from typing import Any

from upweight.rollout.cursor import has_cursor
from upweight.rollout.dataset import DatasetProtocol
from upweight.rollout.messages import DatasetFailed, TasksDrawn


class DatasetFeeder(threading.Thread):
    """`request(n)` is answered by one message with at most n tasks; what the dataset gave beyond is kept for the next."""

    def __init__(self, dataset: DatasetProtocol[Any], output_queue: Queue[Any]) -> None:
        super().__init__(name="rollout-dataset", daemon=True)
        self._dataset = dataset
        self._output = output_queue
        self._requests: SimpleQueue[int | None] = SimpleQueue()
        self._left: Iterator[Any] = iter(())

    def request(self, n: int) -> None:
        self._requests.put(n)

    def stop(self) -> None:
        self._requests.put(None)

    def run(self) -> None:
        while (n := self._requests.get()) is not None:
            try:
                specs, state = self._draw(n)
            except BaseException as error:  # noqa: BLE001 (raised again from run(); sys.exit() in a dataset too)
                self._output.put(DatasetFailed(error))
                return
            self._output.put(TasksDrawn(specs, not specs, state))

    def _draw(self, n: int) -> tuple[list[Any], Any]:
        """Tasks, and the dataset's state before it was asked for them; None if they were left from an earlier draw."""
        specs = list(islice(self._left, n))
        if specs:
            return specs, None
        state = self._dataset.state() if has_cursor(self._dataset) else None
        drawn: Any = self._dataset.sample(n)
        if not isinstance(drawn, Iterable):
            name = type(self._dataset).__name__
            raise TypeError(f"{name}.sample({n}) returned {drawn!r}, which is not iterable; return a list of tasks")
        self._left = iter(drawn)
        return list(islice(self._left, n)), state
