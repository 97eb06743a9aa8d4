"""Where a run's tasks come from and what became of them: drawn, put back, settled. Belongs to the main loop's thread.

Tasks that were put back are started before fresh ones are drawn.
"""

from __future__ import annotations

from collections import Counter, deque
from queue import Queue
from typing import Any

from upweight.rollout.cursor import DataCursor
from upweight.rollout.dataset import DatasetProtocol
from upweight.rollout.feeder import DatasetFeeder
from upweight.rollout.messages import TasksDrawn
from upweight.rollout.models import Task

MAX_DRAW = 1024  # tasks asked for at once


class TaskSource:
    """`numbers` in the dataset, by id, of the tasks in flight or buffered; `error` is what the dataset raised."""

    def __init__(
        self, dataset: DatasetProtocol[Any], cursor: DataCursor, output: Queue[Any], max_requeues: int
    ) -> None:
        self.feeder = DatasetFeeder(dataset, output)
        self.cursor = cursor
        self.numbers: dict[str, int] = {}
        self.is_drawing = False
        self.has_ended = False
        self.error: BaseException | None = None
        self._max_requeues = max_requeues
        self._drawn: deque[tuple[int, Any]] = deque()  # numbers and tasks
        self._requeues: Counter[int] = Counter()  # how often a task, by number, was put back

    @property
    def is_dry(self) -> bool:
        """Whether the dataset gives nothing more; tasks that were drawn may be left."""
        return self.has_ended or self.error is not None

    @property
    def is_empty(self) -> bool:
        return self.is_dry and not self._drawn

    def take(self, wanted: int, version: int | None) -> list[Task[Any]]:
        """Up to `wanted` tasks to start at `version`; what is missing is asked for."""
        taken = [] if version is None else [self._drawn.popleft() for _ in range(min(wanted, len(self._drawn)))]
        tasks: list[Task[Any]] = [Task(spec=spec, starting_inference_version=version or 0) for _, spec in taken]
        self.numbers.update((task.id, number) for task, (number, _) in zip(tasks, taken, strict=True))
        if wanted > len(tasks) and not self.is_drawing and not self.is_dry:
            self.is_drawing = True
            self.feeder.request(min(wanted - len(tasks), MAX_DRAW))
        return tasks

    def note_drawn(self, news: TasksDrawn) -> None:
        self.is_drawing = False
        self._drawn.extend(self.cursor.number(news.specs, news.state))
        self.has_ended = news.ended

    def requeue(self, task: Task[Any]) -> bool:
        """Put a lost task back to the end of the queue, if it may come again."""
        number = self.numbers.get(task.id)
        if number is None or self._requeues[number] >= self._max_requeues:
            return False
        del self.numbers[task.id]
        self._requeues[number] += 1
        self._drawn.append((number, task.spec))
        return True

    def settle(self, task_id: str) -> None:
        """The task is done with: a resumed run need not draw it again."""
        number = self.numbers.pop(task_id, None)
        if number is not None:
            self._requeues.pop(number, None)
            self.cursor.settle(number)
