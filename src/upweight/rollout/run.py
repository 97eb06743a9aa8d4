"""One run: the main loop that reacts to news of the helper threads, and everything it owns.

Invariants
1. Only the loop's thread touches the scheduler and the counts.
2. Accepted samples belong to the uploader at once; before an error leaves, it gets `shutdown_timeout` to send them.
3. The loop itself never blocks on the network, the dataset or a rollout.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, Queue
from typing import Any

import httpx

from upweight.api_client import APIError, TokenFactory
from upweight.api_client.models.rl_job import JobStatus
from upweight.rollout import messages
from upweight.rollout.config import RolloutConfig
from upweight.rollout.context import RolloutContext
from upweight.rollout.cursor import DataCursor
from upweight.rollout.dataset import DatasetProtocol
from upweight.rollout.dispatcher import DEFAULT_QUEUE_GET_TIMEOUT
from upweight.rollout.evaluation import EvaluationPlan
from upweight.rollout.exceptions import DatasetExhausted, UploadFailed
from upweight.rollout.group_log import GroupLog
from upweight.rollout.ledger import RecentIds, fate_of
from upweight.rollout.models import JobStatusUpdate, RolloutException, RolloutResult, Task
from upweight.rollout.outage import Outage
from upweight.rollout.resume import SpoolSender, find_position
from upweight.rollout.setup import effective_batches, make_dispatcher, make_evaluation, make_scheduler, upload_plan
from upweight.rollout.shutdown import end
from upweight.rollout.spool import Spool
from upweight.rollout.startup import Stopped
from upweight.rollout.state import Parts, RunState
from upweight.rollout.summary import RunProgress, RunSummary
from upweight.rollout.tasks import TaskSource
from upweight.rollout.tracker import JobStatusTracker, Served, end_of_job, wait_until_ready
from upweight.rollout.uploader import Uploader
from upweight.rollout.waits import WaitWatch

logger = logging.getLogger(__name__)

MAX_BACKLOG_BATCHES = 4  # unsent batches beyond which no rollout is started


@dataclass(frozen=True)
class RunInputs:
    """What is run, and for which job."""

    api_client: TokenFactory
    config: RolloutConfig
    rollout_fn: Callable[..., Any]
    dataset: DatasetProtocol[Any]
    cursor: DataCursor
    evaluation: EvaluationPlan | None = None


@dataclass(frozen=True)
class RunControl:
    """How other threads reach a run: two events, and the queue that wakes it. `publish` gets each snapshot."""

    stopping: threading.Event
    report_asked: threading.Event
    queue: Queue[Any]
    publish: Callable[[RunProgress], None]


class Run:
    """The main loop of one run."""

    def __init__(self, inputs: RunInputs, control: RunControl) -> None:
        config = inputs.config
        self._inputs, self._api = inputs, inputs.api_client
        self._stopping, self._queue, self._control = control.stopping, control.queue, control
        self._config = config.model_copy()  # rollouts can reach the other one, and change it
        self._context = RolloutContext(config, inputs.api_client)
        self._tasks: Queue[Any] = Queue()
        self._recent_ids = RecentIds()
        self._group_log = GroupLog(config.group_log, config.job_id)
        self._spool = Spool(None, config.job_id)
        self._ended_as: str | None = None
        self._evaluation = make_evaluation(inputs.evaluation, self._context, control.queue)
        self._outage = Outage(config.max_concurrency // config.num_samples_per_task)
        self._state = RunState(self._config, self._outage, config.num_batches, self._evaluation)
        self._ledger = self._state.ledger

    # -- life cycle

    def execute(self) -> RunSummary:
        """Feed the job until it is full, stopped or broken."""
        # Built first: what cannot be sent to worker processes is reported before anything else happens.
        self._dispatcher = make_dispatcher(
            self._inputs.rollout_fn,
            self._context,
            self._config,
            self._tasks,
            self._queue,
            current_version=lambda: self._scheduler.inference_version,
            served=lambda: self._tracker.served,
        )
        try:
            status = wait_until_ready(
                self._api,
                self._config.job_id,
                self._config.job_init_timeout,
                self._config.status_polling_interval,
                self._stopping,
                self._is_full,
            )
            if status is None or self._stopping.is_set():
                return self._state.summary("stopped")
            self._state.num_batches = effective_batches(self._config, status)
            self._state.filled = status.filled_batches
            if self._state.num_batches is not None and status.filled_batches >= self._state.num_batches:
                return self._state.summary("all batches were filled already")
            if end_of_job(self._config.job_id, status) is not None:
                return self._state.summary("the job succeeded")
            return self._feed(status)
        except Stopped:
            return self._state.summary("stopped")
        except (APIError, httpx.HTTPError, UploadFailed):
            if self._stopping.is_set():  # the stop cut a call short
                return self._state.summary("stopped")
            raise
        finally:
            self._context.close()
            self._group_log.close()
            self._spool.close()

    def _is_full(self, status: JobStatus) -> bool:
        needed = [n for n in (self._config.num_batches, status.total_batches) if n is not None]
        return bool(needed) and status.filled_batches >= min(needed)

    def _feed(self, status: JobStatus) -> RunSummary:
        self._spool = spool = Spool(self._config.spool_dir, self._config.job_id)
        plan = upload_plan(self._config, self._state.num_batches)
        began = time.monotonic()
        self._state.resumed = SpoolSender(self._api, plan, spool, self._stopping).send()
        self._state.dropped_samples += self._state.resumed.dropped
        left = self._start_seconds_left(time.monotonic() - began)
        opened, position = find_position(
            self._api, self._config, self._state.num_batches, seconds=left, stopping=self._stopping
        )
        self._state.filled, self._state.open_samples = divmod(position, plan.batch_size)
        self._scheduler = make_scheduler(self._config, self._state.num_batches, position, status)
        self._uploader = Uploader(self._api, plan, position, self._queue, spool, opened=opened)
        self._inputs.cursor.rewind(spool.task_numbers)
        self._source = TaskSource(
            self._inputs.dataset, self._inputs.cursor, self._queue, self._config.requeue_lost_tasks
        )
        self._tracker = JobStatusTracker(
            self._config.job_id,
            self._api,
            self._queue,
            self._config.status_polling_interval,
            failure_timeout=self._config.status_failure_timeout,
        )
        if status.inference_version is not None:
            self._tracker.served = Served(status.inference_version)
        helpers: list[Any] = [self._uploader, self._dispatcher, self._source.feeder, self._tracker]
        if self._evaluation is not None and status.inference_version is not None:
            helpers.append(self._evaluation.evaluator)
            self._evaluation.note_version(status.inference_version)
        for helper in helpers:
            helper.start()
        self._parts = Parts(self._scheduler, self._uploader, self._dispatcher, self._source)
        self._state.parts = self._parts
        self._state.watch = WaitWatch()  # from now on rollouts can start
        try:
            reason = self._loop()
        except BaseException as error:  # on every way out threads and workers end
            seconds = 0.0 if isinstance(error, KeyboardInterrupt) else self._config.shutdown_timeout
            end(self._uploader, helpers, seconds)
            raise
        end(self._uploader, helpers, self._config.shutdown_timeout)
        return self._state.summary(reason)

    def _start_seconds_left(self, spent_on_spool: float) -> float | None:
        """Of `job_init_timeout`, which the samples of an earlier run do not use up; a second at least, so that a call can end."""
        timeout = self._config.job_init_timeout
        if not timeout:
            return timeout
        return max(1.0, timeout - (time.monotonic() - self._state.began - spent_on_spool))

    def _loop(self) -> str:
        while True:
            self._start_rollouts()
            cause = self._state.waiting_for(self._parts)
            self._control.publish(self._state.snapshot(self._parts, cause))
            if self._control.report_asked.is_set():
                self._control.report_asked.clear()
                logger.warning("%s", self.report())
            reason = self._reason_to_end()
            if reason is not None and self._is_evaluated:
                return reason
            if reason is not None or self._state.evaluating is not None:
                self._state.watch.hold()
            limit, stalled = self._config.no_progress_timeout, partial(self._state.stalled, self._parts)
            self._state.watch.check(cause, self._state.fates_in_words(), limit, stalled)
            try:
                for message in self._next_messages():
                    self._handle(message)
            finally:
                self._inputs.cursor.save()

    def _next_messages(self) -> list[messages.RolloutRunnerInputs]:
        """All news that are there, after waiting for the first; none if nothing came in time."""
        began, kind, news = time.monotonic(), self._state.kind_of_wait(self._parts), []
        with contextlib.suppress(Empty):
            news.append(self._queue.get(timeout=DEFAULT_QUEUE_GET_TIMEOUT))
        self._state.watch.wait(kind, time.monotonic() - began)
        with contextlib.suppress(Empty):
            while news:
                news.append(self._queue.get_nowait())
        return news

    def _reason_to_end(self) -> str | None:
        if self._stopping.is_set():
            return "stopped"
        if self._ended_as is not None:
            return self._ended_as
        if self._uploader.backlog:
            if not self._scheduler.n_in_flight and not self._source.is_drawing:
                self._uploader.hurry()
            return None
        if self._state.is_complete(self._parts):
            return "all batches are filled"
        if self._source.is_empty and not self._scheduler.n_in_flight:
            return self._end_of_data()
        return None

    @property
    def _is_evaluated(self) -> bool:
        """Whether nothing is left to be scored before the end."""
        if self._evaluation is None or self._stopping.is_set():
            return True
        version = self._scheduler.inference_version or 0
        return self._evaluation.is_done(self._state.filled, version, is_last_version=self._ended_as is not None)

    def _end_of_data(self) -> str:
        if self._source.error is not None:
            raise self._source.error
        if self._state.num_batches is not None:
            state = {
                "filled": self._state.filled,
                "needed": self._state.num_batches,
                "open_samples": self._state.open_samples,
            }
            raise DatasetExhausted(**state, losses=self._ledger.losses())
        return "the dataset ended"

    # -- starting rollouts

    def _start_rollouts(self) -> None:
        if self._stopping.is_set() or self._ended_as is not None or self._source.is_empty:
            return
        if self._evaluation is not None and self._evaluation.is_first_pending:
            return
        if self._uploader.backlog >= MAX_BACKLOG_BATCHES * self._config.batch_size:
            return
        wanted = max(0, self._scheduler.get_num_rollouts_to_spawn()) // self._config.num_samples_per_task
        wanted = self._outage.may_start(wanted)
        tasks = self._source.take(wanted, self._scheduler.inference_version)
        if tasks:
            self._scheduler.add_tasks(tasks)
            self._ledger.counts.started += len(tasks)
            self._note_progress()
        for task in tasks:
            self._outage.note_started(task.id)
            self._tasks.put(task)

    # -- news

    def _handle(self, message: messages.RolloutRunnerInputs) -> None:
        match message:
            case RolloutResult():
                self._on_result(message)
            case RolloutException():
                self._on_exception(message)
            case JobStatusUpdate(inference_version=version):
                self._on_version(version)
            case messages.TasksDrawn():
                self._source.note_drawn(message)
                self._note_progress()
            case messages.DatasetFailed(exception=error):
                self._source.error = error
            case messages.Uploaded(batches_filled=filled, open_samples=open_samples):
                self._state.filled, self._state.open_samples = filled, open_samples
                self._state.watch.note_progress()
            case messages.PlacesTaken(n_places=n_places, dropped=dropped):
                self._state.dropped_samples += dropped
                self._scheduler.shift(n_places)
                self._hand_over()
            case messages.JobEnded(error=error):
                if error is not None:
                    raise error
                self._ended_as = "the job succeeded"
            case messages.Broken(exception=exception):
                raise exception
            case messages.Evaluated(version=version, means=means):
                assert self._evaluation is not None
                self._evaluation.note_result(version, means)
                self._state.watch.note_progress()
            case messages.WakeUp():
                pass

    def _on_result(self, result: RolloutResult) -> None:
        task, group = result.task, result.sample_group
        self._ledger.note_attempts(result.retries, result.reasons)
        if result.error is None:
            self._outage.note_success()
        else:
            self._outage.note_failure(task.id, result.error)
        self._note_progress()
        if result.error is not None or group.is_rejected:
            self._ledger.note_loss(result.error)
            self._group_log.note(result, fate_of(result.error))
            self._scheduler.remove_task(task.id)
            if result.error is None or not self._is_put_back(task):
                self._source.settle(task.id)
            self._hand_over()
            return
        encoded = self._recent_ids.unique(result.encoded or [])
        reported = min((sample.reported for sample in encoded if sample.reported is not None), default=None)
        stamps = (reported, result.starting_inference_version, task.starting_inference_version)
        version = next(v for v in stamps if v is not None)
        samples = [sample.stamp(task.id, version) for sample in encoded]
        before = self._scheduler.dropped_groups, self._scheduler.surplus_groups
        self._scheduler.set_task_version(task.id, version)
        self._scheduler.add_sample_group(task.id, samples)
        is_dropped = self._scheduler.dropped_groups > before[0]
        fate = (
            "dropped_stale" if is_dropped else "surplus" if self._scheduler.surplus_groups > before[1] else "accepted"
        )
        self._group_log.note(result, fate, samples)
        is_back = is_dropped and self._is_put_back(task)
        self._hand_over()
        if not is_back and not self._scheduler.buffered_groups:  # accepted, or else dropped
            self._source.settle(task.id)

    def _note_progress(self) -> None:
        """Rollouts that start only to fail are none."""
        if not self._outage.is_on:
            self._state.watch.note_progress()

    def _is_put_back(self, task: Task[Any]) -> bool:
        is_back = self._source.requeue(task)
        self._ledger.counts.requeued += is_back
        return is_back

    def _on_exception(self, message: RolloutException) -> None:
        self._ledger.note_attempts(message.retries, message.reasons)
        if message.task is not None:
            self._ledger.note_loss(message.exception)
            self._group_log.note(message, fate_of(message.exception))
            self._scheduler.remove_task(message.task.id)
            self._hand_over()
        if getattr(message.exception, "remote_traceback", None):
            message.exception.add_note(f"In the worker process:\n{message.traceback}")
        raise message.exception

    def _on_version(self, version: int) -> None:
        known = self._scheduler.inference_version
        if known is not None and version < known:
            logger.warning("The inference version went back from %d to %d", known, version)
            self._scheduler.rollback_inference_version(version)
        else:
            self._scheduler.set_inference_version(version)
        if self._evaluation is not None:
            self._evaluation.note_version(version)
        self._state.watch.note_progress()

    def _hand_over(self) -> None:
        """Ready samples go to the uploader; drops are logged."""
        ready = self._scheduler.get_ready_samples()
        if ready:
            self._state.watch.note_accepted()
            self._spool.add(ready, self._source.numbers)
            for task_id in {sample.task_id for sample in ready}:
                self._source.settle(task_id)
            self._inputs.cursor.save()  # between spool and uploader: see the invariants of the cursor
            self._uploader.put(ready)
        self._ledger.note_scheduled(self._scheduler, self._scheduler.get_dropped_groups())

    # -- the end

    def report(self) -> str:
        """What the run waits for, what it has counted, and where its rollouts are. From any thread."""
        return self._state.report()
