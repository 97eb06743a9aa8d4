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
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
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
from upweight.rollout.dispatcher import DEFAULT_QUEUE_GET_TIMEOUT, RolloutDispatcher
from upweight.rollout.evaluation import EvaluationPlan, EvaluationSchedule, Evaluator
from upweight.rollout.exceptions import DatasetExhausted, RolloutStalled, UploadFailed
from upweight.rollout.feeder import DatasetFeeder
from upweight.rollout.group_log import GroupLog
from upweight.rollout.ledger import Ledger, RecentIds, fate_of
from upweight.rollout.models import JobStatusUpdate, RolloutException, RolloutResult, Task
from upweight.rollout.outage import Outage
from upweight.rollout.progress import in_words
from upweight.rollout.resume import Resumed, SpoolSender, find_position
from upweight.rollout.setup import effective_batches, make_scheduler, upload_plan
from upweight.rollout.spool import Spool
from upweight.rollout.startup import Stopped
from upweight.rollout.summary import RunProgress, RunSummary
from upweight.rollout.tracker import JobStatusTracker, Served, end_of_job, wait_until_ready
from upweight.rollout.uploader import Uploader
from upweight.rollout.waiting import what_is_awaited
from upweight.rollout.waits import WaitWatch

logger = logging.getLogger(__name__)

MAX_DRAW = 1024  # tasks asked for at once
LAST_JOINS_S = 0.5  # for threads to end when no time is left
MAX_BACKLOG_BATCHES = 4  # unsent batches beyond which no rollout is started


class Run:
    """State of one run; `stopping` and `queue` are how other threads reach it."""

    def __init__(
        self,
        api_client: TokenFactory,
        config: RolloutConfig,
        rollout_fn: Callable[..., Any],
        dataset: DatasetProtocol[Any],
        stopping: threading.Event,
        queue: Queue[Any],
        publish: Callable[[RunProgress], None],
        evaluation: EvaluationPlan | None = None,
        cursor: DataCursor | None = None,
        report_asked: threading.Event | None = None,
    ) -> None:
        self._report_asked = report_asked or threading.Event()
        self._api, self._rollout_fn, self._dataset = api_client, rollout_fn, dataset
        self._config = config.model_copy()  # rollouts can reach the other one, and change it
        self._stopping, self._queue, self._publish = stopping, queue, publish
        self._began = time.monotonic()
        self._context = RolloutContext(config, api_client)
        self._tasks: Queue[Any] = Queue()
        self._cursor = cursor or DataCursor(dataset, config.spool_dir, config.job_id)
        self._drawn: deque[tuple[int, Any]] = deque()  # numbers and tasks
        self._numbers: dict[str, int] = {}  # of tasks in flight or buffered
        self._requeues: Counter[int] = Counter()  # how often a task, by number, was put back
        self._ledger = Ledger()
        self._recent_ids = RecentIds()
        self._counts = self._ledger.counts
        self._group_log = GroupLog(config.group_log, config.job_id)
        self._resumed = Resumed()
        self._spool = Spool(None, config.job_id)
        self._dropped_samples = 0
        self._is_drawing = self._dataset_ended = False
        self._dataset_error: BaseException | None = None
        self._ended_as: str | None = None
        self._filled = self._open_samples = 0
        self._num_batches = config.num_batches
        self._watch = WaitWatch()
        self._outage = Outage(config.max_concurrency // config.num_samples_per_task)
        self._evaluation: EvaluationSchedule | None = None
        if evaluation is not None:
            places = max(1, config.max_concurrency)
            evaluator = Evaluator(evaluation.tasks, evaluation.eval_fn, self._context, places, queue)
            self._evaluation = EvaluationSchedule(evaluator, evaluation.every)

    # -- life cycle

    def execute(self) -> RunSummary:
        """Feed the job until it is full, stopped or broken."""
        # Built first: what cannot be sent to worker processes is reported before anything else happens.
        self._dispatcher = self._make_dispatcher()
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
                return self._summary("stopped")
            self._num_batches = effective_batches(self._config, status)
            self._filled = status.filled_batches
            if self._num_batches is not None and status.filled_batches >= self._num_batches:
                return self._summary("all batches were filled already")
            if end_of_job(self._config.job_id, status) is not None:
                return self._summary("the job succeeded")
            return self._feed(status)
        except Stopped:
            return self._summary("stopped")
        except (APIError, httpx.HTTPError, UploadFailed):
            if self._stopping.is_set():  # the stop cut a call short
                return self._summary("stopped")
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
        plan = upload_plan(self._config, self._num_batches)
        began = time.monotonic()
        self._resumed = SpoolSender(self._api, plan, spool, self._stopping).send()
        self._dropped_samples += self._resumed.dropped
        left = self._start_seconds_left(time.monotonic() - began)
        opened, position = find_position(
            self._api, self._config, self._num_batches, seconds=left, stopping=self._stopping
        )
        self._filled, self._open_samples = divmod(position, plan.batch_size)
        self._scheduler = make_scheduler(self._config, self._num_batches, position, status)
        self._uploader = Uploader(self._api, plan, position, self._queue, spool, opened=opened)
        self._cursor.rewind(spool.task_numbers)
        self._feeder = DatasetFeeder(self._dataset, self._queue)
        self._tracker = JobStatusTracker(
            self._config.job_id,
            self._api,
            self._queue,
            self._config.status_polling_interval,
            failure_timeout=self._config.status_failure_timeout,
        )
        if status.inference_version is not None:
            self._tracker.served = Served(status.inference_version)
        helpers: list[Any] = [self._uploader, self._dispatcher, self._feeder, self._tracker]
        if self._evaluation is not None and status.inference_version is not None:
            helpers.append(self._evaluation.evaluator)
            self._evaluation.note_version(status.inference_version)
        for helper in helpers:
            helper.start()
        self._watch = WaitWatch()  # from now on rollouts can start
        try:
            reason = self._loop()
        except BaseException as error:  # on every way out threads and workers end
            self._end(helpers, is_urgent=isinstance(error, KeyboardInterrupt))
            raise
        self._end(helpers)
        return self._summary(reason)

    def _start_seconds_left(self, spent_on_spool: float) -> float | None:
        """Of `job_init_timeout`, which the samples of an earlier run do not use up; a second at least, so that a call can end."""
        timeout = self._config.job_init_timeout
        if not timeout:
            return timeout
        return max(1.0, timeout - (time.monotonic() - self._began - spent_on_spool))

    def _end(self, helpers: list[Any], is_urgent: bool = False) -> None:
        """Send the rest and shut down, both within one `shutdown_timeout`; an interrupt here ends either at once."""
        deadline = time.monotonic() + (0.0 if is_urgent else self._config.shutdown_timeout)
        try:
            self._send_rest(deadline)
        except BaseException:  # an interrupt as well: no more waiting
            deadline = time.monotonic()
            raise
        finally:
            self._shut_down(helpers, max(deadline, time.monotonic() + LAST_JOINS_S))

    def _loop(self) -> str:
        while True:
            self._start_rollouts()
            cause = self._waiting_for()
            self._publish(self._snapshot(cause))
            if self._report_asked.is_set():
                self._report_asked.clear()
                logger.warning("%s", self.report())
            reason = self._reason_to_end()
            if reason is not None and self._is_evaluated:
                return reason
            if reason is not None or self._evaluating is not None:
                self._watch.hold()
            self._watch.check(cause, self._config.no_progress_timeout, self._stalled)
            try:
                for message in self._next_messages():
                    self._handle(message)
            finally:
                self._cursor.save()

    def _next_messages(self) -> list[messages.RolloutRunnerInputs]:
        """All news that are there, after waiting for the first; none if nothing came in time."""
        began, kind, news = time.monotonic(), self._kind_of_wait(), []
        with contextlib.suppress(Empty):
            news.append(self._queue.get(timeout=DEFAULT_QUEUE_GET_TIMEOUT))
        self._watch.wait(kind, time.monotonic() - began)
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
            if not self._scheduler.n_in_flight:
                self._uploader.hurry()
            return None
        if self._is_complete:
            return "all batches are filled"
        if self._is_source_dry and not self._scheduler.n_in_flight and not self._drawn:
            return self._end_of_data()
        return None

    @property
    def _is_complete(self) -> bool:
        return self._scheduler.is_all_finished and self._filled >= (self._num_batches or 0)

    @property
    def _is_evaluated(self) -> bool:
        """Whether nothing is left to be scored before the end."""
        if self._evaluation is None or self._stopping.is_set():
            return True
        version = self._scheduler.inference_version or 0
        return self._evaluation.is_done(self._filled, version, is_last_version=self._ended_as is not None)

    @property
    def _is_source_dry(self) -> bool:
        return self._dataset_ended or self._dataset_error is not None

    def _end_of_data(self) -> str:
        if self._dataset_error is not None:
            raise self._dataset_error
        if self._num_batches is not None:
            state = {"filled": self._filled, "needed": self._num_batches, "open_samples": self._open_samples}
            raise DatasetExhausted(**state, losses=self._ledger.losses())
        return "the dataset ended"

    # -- set-up

    def _make_dispatcher(self) -> RolloutDispatcher:
        config = self._config
        return RolloutDispatcher(
            self._rollout_fn,
            self._context,
            self._tasks,
            self._queue,
            concurrent_workers=config.max_concurrency // config.num_samples_per_task,
            num_rollout_retries=config.num_rollout_retries,
            raise_on_rollout_failure=config.raise_on_rollout_failure,
            executor_type=config.executor_type,
            group_size=config.num_samples_per_task,
            rollout_timeout=config.rollout_timeout,
            retry_backoff=config.rollout_retry_backoff,
            max_pool_restarts=config.max_pool_restarts,
            process_start_method=config.process_start_method,
            current_version=lambda: self._scheduler.inference_version,
            served=lambda: self._tracker.served,
        )

    # -- starting rollouts

    def _start_rollouts(self) -> None:
        if self._stopping.is_set() or self._ended_as is not None or (self._is_source_dry and not self._drawn):
            return
        if self._evaluation is not None and self._evaluation.is_first_pending:
            return
        if self._uploader.backlog >= MAX_BACKLOG_BATCHES * self._config.batch_size:
            return
        wanted = max(0, self._scheduler.get_num_rollouts_to_spawn()) // self._config.num_samples_per_task
        wanted = self._outage.may_start(wanted)
        version = self._scheduler.inference_version
        starting = [self._drawn.popleft() for _ in range(min(wanted, len(self._drawn)))]
        if starting and version is not None:
            tasks: list[Task[Any]] = [Task(spec=spec, starting_inference_version=version) for _, spec in starting]
            self._numbers.update((task.id, number) for task, (number, _) in zip(tasks, starting, strict=True))
            self._scheduler.add_tasks(tasks)
            self._counts.started += len(tasks)
            self._note_progress()
            for task in tasks:
                self._outage.note_started(task.id)
                self._tasks.put(task)
        if wanted > len(starting) and not self._is_drawing and not self._is_source_dry:
            self._is_drawing = True
            self._feeder.request(min(wanted - len(starting), MAX_DRAW))

    # -- news

    def _handle(self, message: messages.RolloutRunnerInputs) -> None:
        match message:
            case RolloutResult():
                self._on_result(message)
            case RolloutException():
                self._on_exception(message)
            case JobStatusUpdate(inference_version=version):
                self._on_version(version)
            case messages.TasksDrawn(specs=specs, ended=ended, state=state):
                self._is_drawing = False
                self._drawn.extend(self._cursor.number(specs, state))
                self._dataset_ended = ended
                self._note_progress()
            case messages.DatasetFailed(exception=error):
                self._dataset_error = error
            case messages.Uploaded(batches_filled=filled, open_samples=open_samples):
                self._filled, self._open_samples = filled, open_samples
                self._watch.note_progress()
            case messages.PlacesTaken(n_places=n_places, dropped=dropped):
                self._dropped_samples += dropped
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
                self._watch.note_progress()
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
            if result.error is None or not self._requeue(task):
                self._settle(task.id)
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
        is_back = is_dropped and self._requeue(task)
        self._hand_over()
        if not is_back and not self._scheduler.buffered_groups:  # accepted, or else dropped
            self._settle(task.id)

    def _note_progress(self) -> None:
        """Rollouts that start only to fail are none."""
        if not self._outage.is_on:
            self._watch.note_progress()

    def _requeue(self, task: Task[Any]) -> bool:
        """Put a lost task back to the end of the queue, if it may come again."""
        number = self._numbers.get(task.id)
        if number is None or self._requeues[number] >= self._config.requeue_lost_tasks:
            return False
        del self._numbers[task.id]
        self._requeues[number] += 1
        self._counts.requeued += 1
        self._drawn.append((number, task.spec))
        return True

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
        self._watch.note_progress()

    def _hand_over(self) -> None:
        """Ready samples go to the uploader; drops are logged."""
        ready = self._scheduler.get_ready_samples()
        if ready:
            self._watch.note_accepted()
            self._spool.add(ready, self._numbers)
            for task_id in {sample.task_id for sample in ready}:
                self._settle(task_id)
            self._cursor.save()  # between spool and uploader: see the invariants of the cursor
            self._uploader.put(ready)
        self._ledger.note_scheduled(self._scheduler, self._scheduler.get_dropped_groups())

    def _settle(self, task_id: str) -> None:
        """The task is done with: a resumed run need not draw it again."""
        number = self._numbers.pop(task_id, None)
        if number is not None:
            self._requeues.pop(number, None)
            self._cursor.settle(number)

    # -- waiting

    def _waiting_for(self) -> str:
        if self._is_complete and self._evaluating is None and not self._uploader.backlog:
            return f"version {self._filled}, the last one, to evaluate it"
        return what_is_awaited(
            self._uploader, self._dispatcher, self._scheduler, self._is_drawing, self._evaluating, self._outage
        )

    @property
    def _evaluating(self) -> int | None:
        return None if self._evaluation is None else self._evaluation.pending

    def _kind_of_wait(self) -> str:
        if self._scheduler.n_in_flight:
            return "rollouts"
        if self._uploader.backlog:
            return "uploads"
        if self._is_drawing:
            return "dataset"
        if self._outage.is_on:
            return "outage"
        return "version" if self._evaluating is None else "evaluation"

    def report(self) -> str:
        """What the run waits for, what it has counted, and where its rollouts are. From any thread."""
        if not hasattr(self, "_uploader"):
            return f"Job {self._config.job_id}: waiting for the job to serve"
        losses = self._ledger.losses() or "nothing lost"
        return (
            f"Job {self._config.job_id}: {in_words(self._snapshot(self._waiting_for()))}; {losses}\n"
            f"{self._dispatcher.stacks()}"
        )

    def _stalled(self, seconds: float) -> RolloutStalled:
        c = self._counts
        return RolloutStalled(
            f"No sample was accepted for {seconds:.0f} s: {c.rejected} rejected, {c.failed} failed, "
            f"{c.dropped_stale} dropped, {c.timed_out} timed out of {c.started} started; "
            f"errors: {dict(self._ledger.errors.most_common())}; waiting for {self._waiting_for()}"
        )

    def _snapshot(self, cause: str) -> RunProgress:
        in_flight, buffered = self._scheduler.n_in_flight, self._scheduler.buffered_groups
        return RunProgress(
            counts=replace(self._counts, unfinished=in_flight + buffered),
            batches_filled=self._filled,
            num_batches=self._num_batches,
            samples_in_batch=self._open_samples,
            in_flight=in_flight,
            buffered=buffered,
            backlog=self._uploader.backlog,
            inference_version=self._scheduler.inference_version,
            seconds=time.monotonic() - self._began,
            waiting_for=cause,
            evaluations=dict(self._evaluation.results) if self._evaluation is not None else {},
        )

    # -- the end

    def _send_rest(self, deadline: float) -> None:
        """Give the uploader the time until then to send what was accepted."""
        while self._uploader.backlog and self._uploader.is_alive() and time.monotonic() < deadline:
            self._uploader.hurry()
            time.sleep(0.01)
        if self._uploader.backlog:
            logger.warning("Job %s: %d accepted samples are unsent", self._config.job_id, self._uploader.backlog)

    def _shut_down(self, helpers: list[Any], deadline: float) -> None:
        for helper in helpers:
            helper.stop()
        for helper in helpers:
            helper.join(max(0.0, deadline - time.monotonic()))
            if helper.is_alive():
                logger.warning("Thread %s is still waiting; it is left behind", helper.name)

    def _summary(self, reason: str) -> RunSummary:
        summary = RunSummary(**vars(self._counts), seconds=time.monotonic() - self._began, reason=reason)
        summary.batches_filled = self._filled
        summary.errors = dict(self._ledger.errors.most_common())
        summary.dropped_ages = dict(sorted(self._ledger.dropped_ages.items()))
        summary.dropped_lengths = dict(sorted(self._ledger.dropped_lengths.items()))
        summary.resumed_samples, summary.stored_before = self._resumed.samples, self._resumed.stored_before
        if hasattr(self, "_scheduler"):
            summary.unfinished = self._scheduler.n_in_flight + self._scheduler.buffered_groups
            summary.surplus_samples = self._scheduler.surplus_samples
            summary.dropped_samples = self._dropped_samples
            summary.unsent_samples = self._uploader.backlog + self._resumed.refused
            summary.batches_filled = self._uploader.position // self._config.batch_size
            summary.staleness = dict(sorted(self._uploader.staleness.items()))
            summary.waited = dict(self._watch.seconds_by_cause)
        if self._evaluation is not None:
            summary.evaluations = dict(self._evaluation.results)
        return summary
