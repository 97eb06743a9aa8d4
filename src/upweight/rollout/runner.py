"""The public face of a rollout run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Queue
from typing import Any

from upweight.api_client import TokenFactory
from upweight.rollout.arguments import check_arguments, plan_evaluation
from upweight.rollout.config import RolloutConfig, check_config
from upweight.rollout.cursor import DataCursor
from upweight.rollout.dataset import DatasetProtocol
from upweight.rollout.dispatcher import DEFAULT_QUEUE_GET_TIMEOUT, RolloutDispatcher
from upweight.rollout.messages import RolloutRunnerInputs, WakeUp
from upweight.rollout.progress import KINDS, ProgressKind, Show, reporting
from upweight.rollout.run import Run, RunControl, RunInputs
from upweight.rollout.signals import run_signals
from upweight.rollout.summary import RunProgress, RunSummary
from upweight.rollout.tracker import JobStatusTracker

__all__ = [
    "DEFAULT_QUEUE_GET_TIMEOUT",
    "JobStatusTracker",
    "RolloutDispatcher",
    "RolloutRunner",
    "RolloutRunnerInputs",
    "RunProgress",
    "RunSummary",
]


class RolloutRunner:
    """Runs `rollout_fn` over tasks of `dataset` and uploads accepted samples to the job.

    Args:
        rollout_fn: called as `rollout_fn(task=<spec>, context=<RolloutContext>)`, plain or `async`; returns a
            `SampleGroup` with exactly `num_samples_per_task` samples, or a rejected one.
        eval_dataset: held-out tasks, gone through in full by each evaluation.
        eval_every: versions between two evaluations; None = only at both ends of the run.
        eval_fn: called as `eval_fn(task=…, context=…)`, returns scores by name; their means are posted to the job.
        progress: "rich" (a live line) or "plain" lines on standard error, "log" (INFO records), "none", or "auto": "rich"
            where standard error is a terminal, else "plain".

    Raises:
        pydantic.ValidationError: the config is out of range.
        TypeError, ValueError: another argument cannot be used; the line names it and the remedy.
    """

    def __init__(
        self,
        api_client: TokenFactory,
        config: RolloutConfig,
        rollout_fn: Callable[..., Any],
        dataset: DatasetProtocol[Any],
        *,
        eval_dataset: Iterable[Any] | None = None,
        eval_every: int | None = None,
        eval_fn: Callable[..., Any] | None = None,
        progress: ProgressKind = "auto",
    ) -> None:
        check_config(config)
        if progress not in KINDS:
            raise ValueError(f"progress is {progress!r}; it must be one of {', '.join(KINDS)}")
        self._progress_kind: ProgressKind = progress
        check_arguments(rollout_fn, dataset)
        self._evaluation = plan_evaluation(eval_dataset, eval_every, eval_fn)
        self._api_client = api_client
        self._config = config
        self._rollout_fn = rollout_fn
        self._dataset = dataset
        self._cursor = DataCursor(dataset, config.spool_dir, config.job_id)
        self._stopping = threading.Event()
        self._queue: Queue[Any] = Queue()
        self._progress: RunProgress | None = None
        self._show: Show = lambda progress: None
        self._stopped_by: str | None = None
        self._report_asked = threading.Event()
        self._busy = threading.Lock()
        self._run: Run | None = None

    def run(self) -> RunSummary:
        """Feed the job until it is full, the data ends, or `stop()`, SIGINT or SIGTERM.

        May be called again: each call resumes from the server's state.

        Raises:
            RuntimeError: it is running already, in another thread.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this runner is already running; make another one for a second run at the same time")
        try:
            return self._run_once()
        finally:
            self._busy.release()

    def _run_once(self) -> RunSummary:
        self._queue = Queue()
        self._progress = None
        inputs = RunInputs(
            self._api_client, self._config, self._rollout_fn, self._dataset, self._cursor, self._evaluation
        )
        run = Run(inputs, RunControl(self._stopping, self._report_asked, self._queue, self._publish))
        self._run = run
        try:
            kind, job_id = self._progress_kind, self._config.job_id
            with run_signals(self._stop_by_signal, self._report_asked.set), reporting(kind, job_id) as self._show:
                summary = run.execute()
            if self._stopped_by is not None and summary.reason == "stopped":
                summary.reason = f"stopped by {self._stopped_by}"
            return summary
        finally:
            self._run = None
            self._stopping.clear()
            self._stopped_by = None

    def stop(self) -> None:
        """End the run soon: accepted samples are uploaded, running rollouts abandoned. Thread-safe."""
        self._stopping.set()
        self._queue.put(WakeUp())

    def progress(self) -> RunProgress | None:
        """The latest snapshot of the run; None before the job is ready. Thread-safe."""
        return self._progress

    def report(self) -> str:
        """What the run waits for, its counts, and the stacks of its oldest rollouts. Thread-safe.

        SIGUSR1 logs it while `run()` is in the main thread.
        """
        run = self._run
        return "no run is under way" if run is None else run.report()

    def _publish(self, progress: RunProgress) -> None:
        self._progress = progress
        self._show(progress)

    def _stop_by_signal(self, name: str) -> None:
        # Runs inside a signal handler: setting an event is safe there, a queue's lock might be held.
        self._stopped_by = name
        self._stopping.set()
