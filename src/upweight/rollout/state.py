"""What a run knows of itself, and the ways to say it: a snapshot, a summary, a report, the cause of a wait.

Only the main loop's thread writes; `report` may be called from any thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from upweight.rollout.config import RolloutConfig
from upweight.rollout.dispatcher import RolloutDispatcher
from upweight.rollout.evaluation import EvaluationSchedule
from upweight.rollout.exceptions import RolloutStalled
from upweight.rollout.ledger import Ledger
from upweight.rollout.outage import Outage
from upweight.rollout.progress import in_words
from upweight.rollout.resume import Resumed
from upweight.rollout.summary import RunProgress, RunSummary
from upweight.rollout.tasks import TaskSource
from upweight.rollout.uploader import Uploader
from upweight.rollout.waiting import what_is_awaited
from upweight.rollout.waits import WaitWatch
from upweight.schedulers import BaseRolloutScheduler


@dataclass(frozen=True)
class Parts:
    """What is there once the job serves."""

    scheduler: BaseRolloutScheduler
    uploader: Uploader
    dispatcher: RolloutDispatcher
    source: TaskSource


@dataclass
class RunState:
    """`filled` batches and `open_samples` in the next one are what the server is known to hold."""

    config: RolloutConfig
    outage: Outage
    num_batches: int | None
    evaluation: EvaluationSchedule | None = None
    ledger: Ledger = field(default_factory=Ledger)
    watch: WaitWatch = field(default_factory=WaitWatch)
    began: float = field(default_factory=time.monotonic)
    filled: int = 0
    open_samples: int = 0
    dropped_samples: int = 0
    resumed: Resumed = field(default_factory=Resumed)
    parts: Parts | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def evaluating(self) -> int | None:
        """The version that is being evaluated."""
        return None if self.evaluation is None else self.evaluation.pending

    def is_complete(self, parts: Parts) -> bool:
        return parts.scheduler.is_all_finished and self.filled >= (self.num_batches or 0)

    def waiting_for(self, parts: Parts) -> str:
        """Empty if nothing is left to wait for."""
        if self.is_complete(parts) and self.evaluating is None and not parts.uploader.backlog:
            return "" if self.evaluation is None else f"version {self.filled}, the last one, to evaluate it"
        return what_is_awaited(
            parts.uploader, parts.dispatcher, parts.scheduler, parts.source, self.evaluating, self.outage
        )

    def kind_of_wait(self, parts: Parts) -> str:
        """What the time spent waiting now is booked under."""
        if parts.scheduler.n_in_flight:
            return "rollouts"
        if parts.uploader.backlog:
            return "uploads"
        if parts.source.is_drawing:
            return "dataset"
        if self.outage.is_on:
            return "outage"
        return "version" if self.evaluating is None else "evaluation"

    def report(self) -> str:
        """What the run waits for, what it has counted, and where its rollouts are."""
        job, parts = f"Job {self.config.job_id}", self.parts
        if parts is None:
            return f"{job}: waiting for the job to serve"
        progress = self.snapshot(parts, self.waiting_for(parts))
        return f"{job}: {in_words(progress)}; {self.ledger.losses() or 'nothing lost'}\n{parts.dispatcher.stacks()}"

    def fates_in_words(self) -> str:
        c = self.ledger.counts
        return (
            f"{c.rejected} rejected, {c.failed} failed, {c.dropped_stale} dropped, {c.timed_out} timed out "
            f"of {c.started} started"
        )

    def stalled(self, parts: Parts, seconds: float) -> RolloutStalled:
        return RolloutStalled(
            f"No sample was accepted for {seconds:.0f} s: {self.fates_in_words()}; "
            f"errors: {dict(self.ledger.errors.most_common())}; waiting for {self.waiting_for(parts)}"
        )

    def snapshot(self, parts: Parts, cause: str) -> RunProgress:
        in_flight, buffered = parts.scheduler.n_in_flight, parts.scheduler.buffered_groups
        return RunProgress(
            counts=replace(self.ledger.counts, unfinished=in_flight + buffered),
            batches_filled=self.filled,
            num_batches=self.num_batches,
            samples_in_batch=self.open_samples,
            in_flight=in_flight,
            buffered=buffered,
            backlog=parts.uploader.backlog,
            inference_version=parts.scheduler.inference_version,
            seconds=self.seconds,
            waiting_for=cause or None,
            evaluations=dict(self.evaluation.results) if self.evaluation is not None else {},
        )

    def summary(self, reason: str) -> RunSummary:
        ledger, parts = self.ledger, self.parts
        summary = RunSummary(**vars(ledger.counts), seconds=self.seconds, reason=reason)
        summary.batches_filled = self.filled
        summary.errors = dict(ledger.errors.most_common())
        summary.dropped_ages = dict(sorted(ledger.dropped_ages.items()))
        summary.dropped_lengths = dict(sorted(ledger.dropped_lengths.items()))
        summary.resumed_samples, summary.stored_before = self.resumed.samples, self.resumed.stored_before
        if parts is not None:
            summary.unfinished = parts.scheduler.n_in_flight + parts.scheduler.buffered_groups
            summary.surplus_samples = parts.scheduler.surplus_samples
            summary.dropped_samples = self.dropped_samples
            summary.unsent_samples = parts.uploader.backlog
            summary.refused_samples = self.resumed.refused
            summary.batches_filled = parts.uploader.position // self.config.batch_size
            summary.staleness = dict(sorted(parts.uploader.staleness.items()))
            summary.waited = dict(self.watch.seconds_by_cause)
        if self.evaluation is not None:
            summary.evaluations = dict(self.evaluation.results)
        return summary
