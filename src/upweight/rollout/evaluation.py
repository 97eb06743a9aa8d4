"""Scores held-out tasks now and then, without uploading samples; the means go to the job's metrics.

Invariants
1. An evaluation never ends a run: what fails is logged.
2. The first evaluation is done before the first rollout starts, the last one after the last batch was trained.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from math import isfinite
from queue import Empty, Queue, SimpleQueue
from statistics import fmean
from typing import Any

import httpx

from upweight.api_client import APIError, NotFoundError
from upweight.rollout.context import RolloutContext
from upweight.rollout.exceptions import in_words
from upweight.rollout.messages import Evaluated
from upweight.rollout.models import Task
from upweight.rollout.workers import InThread, Outcome, RolloutCall, WorkerPool

logger = logging.getLogger(__name__)

FINAL_VERSION_WAIT_S = 600.0  # for the version of the last batch, once that is full


@dataclass(frozen=True)
class EvaluationPlan:
    """Held-out tasks, what scores one of them, and how many versions apart (None = only at both ends)."""

    tasks: Iterable[Any]
    eval_fn: Callable[..., Any]
    every: int | None


class Evaluator(threading.Thread):
    """`request(version)` is answered by one `Evaluated` message; at most `concurrency` tasks run at once."""

    def __init__(
        self,
        tasks: Iterable[Any],
        eval_fn: Callable[..., Any],
        context: RolloutContext,
        concurrency: int,
        output_queue: Queue[Any],
    ) -> None:
        super().__init__(name="rollout-evaluator", daemon=True)
        self._tasks = list(tasks)
        self._context = context
        self._concurrency = concurrency
        self._output = output_queue
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        call = RolloutCall(eval_fn, context)
        self._pool = WorkerPool(lambda: InThread(call), self._outcomes.put)
        self._requests: SimpleQueue[int | None] = SimpleQueue()
        self._numbers = count()
        self._timeout = context.config.rollout_timeout
        self._stopping = threading.Event()

    def request(self, version: int) -> None:
        self._requests.put(version)

    def stop(self) -> None:
        self._stopping.set()
        self._requests.put(None)

    def run(self) -> None:
        try:
            while (version := self._requests.get()) is not None and not self._stopping.is_set():
                means = self._score(version)
                if means and not self._stopping.is_set():
                    self._report(version, means)
                self._output.put(Evaluated(version, means))
        finally:
            self._pool.close(timeout=2.0)

    def _score(self, version: int) -> dict[str, float]:
        """Means over the tasks that report a name."""
        waiting, running, scores = list(self._tasks), set[int](), list[Mapping[str, float]]()
        while (waiting or running) and not self._stopping.is_set():
            while waiting and len(running) < self._concurrency:
                number = next(self._numbers)
                self._pool.submit(number, Task(spec=waiting.pop(), starting_inference_version=version))
                running.add(number)
            try:
                outcome = self._outcomes.get(timeout=0.1)
            except Empty:
                running -= self._give_up(running)
                continue
            running.discard(outcome.attempt_id)
            if outcome.error is not None:
                logger.warning("An evaluation task failed: %s", in_words(outcome.error))
            elif _is_score(outcome.result):
                scores.append(outcome.result)
            else:
                logger.warning("An evaluation task gave no finite numbers by name, but %.200r", outcome.result)
        names = sorted({name for score in scores for name in score})
        return {name: fmean(float(score[name]) for score in scores if name in score) for name in names}

    def _give_up(self, running: Iterable[int]) -> set[int]:
        """The tasks that take longer than a rollout may; they are left behind."""
        if self._timeout is None:
            return set()
        limit = time.monotonic() - self._timeout
        late = {number for number in running if (began := self._pool.began(number)) is not None and began < limit}
        for number in late:
            self._pool.abandon(number)
            logger.warning("An evaluation task took longer than %s s; it does not count", self._timeout)
        return late

    def _report(self, version: int, means: Mapping[str, float]) -> None:
        jobs, job_id = self._context.api_client.v1alpha1.fine_tuning.jobs, self._context.config.job_id
        logger.info("Job %s, version %d: %s", job_id, version, means)
        try:
            jobs.post_metrics(job_id=job_id, batch_index=version, metrics=means)
        except NotFoundError:
            logger.info("Job %s: the server takes no metrics", job_id)
        except (APIError, httpx.HTTPError) as error:
            logger.warning("Job %s: metrics were not stored: %s", job_id, error)


def _is_score(result: object) -> bool:
    if not isinstance(result, Mapping):
        return False
    try:
        return all(isinstance(name, str) and isfinite(value) for name, value in result.items())
    except (TypeError, OverflowError):
        return False


class EvaluationSchedule:
    """When to evaluate: at the start, whenever `every` more versions are out, and at the end."""

    def __init__(self, evaluator: Evaluator, every: int | None) -> None:
        self.evaluator = evaluator
        self._every = every
        self._pending: int | None = None
        self._latest: int | None = None
        self._final_since: float | None = None
        self.results: dict[int, dict[str, float]] = {}

    @property
    def pending(self) -> int | None:
        """The version being evaluated."""
        return self._pending

    @property
    def is_first_pending(self) -> bool:
        return self._pending is not None and not self.results

    def note_version(self, version: int) -> None:
        is_first = self._latest is None
        is_due = self._every is not None and self._latest is not None and version >= self._latest + self._every
        if self._pending is None and (is_first or is_due):
            self._start(version)

    def note_result(self, version: int, means: dict[str, float]) -> None:
        self._pending = None
        self.results[version] = means

    def is_done(self, batches_filled: int, version: int, is_last_version: bool) -> bool:
        """Whether the run may end; starts the last evaluation once the last batch is trained."""
        if self._pending is not None:
            return False
        if version in self.results and version >= batches_filled:
            return True
        self._final_since = self._final_since or time.monotonic()
        waited = time.monotonic() - self._final_since
        if version < batches_filled and (is_last_version or waited > FINAL_VERSION_WAIT_S):
            logger.warning("No last evaluation: version %d was not served after %.0f s", batches_filled, waited)
            return True
        if version >= batches_filled:
            self._start(version)
        return False

    def _start(self, version: int) -> None:
        self._pending = self._latest = version
        self.evaluator.request(version)
