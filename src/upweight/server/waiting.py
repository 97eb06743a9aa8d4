"""What a job waits for, told for each part of the loop: rollouts → server → engine → trainer.

Rules, first that fits: a job that is over waits for nothing; one without a place waits for the server; one that loads, trains or
saves works; one that wants samples is followed back to who should send them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

State = Literal["working", "waiting", "stalled", "over"]

FOR_MEMORY = "waits for memory"  # how the reason of a queued job begins for which a place alone is not enough
QUIET = 60.0  # seconds without a sign of life after which a wait is called a stall


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a job at one moment. Ages in seconds, None = never since the server started."""

    job_id: str
    job_status: str
    reason: str
    batch_index: int
    in_batch: int
    batch_size: int
    places: int  # jobs that may run at the same time
    seconds_up: float
    status_age: float | None
    completion_age: float | None
    upload_age: float | None
    phase: str | None  # of the worker; None = no worker runs
    detail: str = ""
    active: int = 0  # requests that the engine answers
    queued: int = 0  # requests that wait for it
    tokens_per_second: float = 0.0
    has_file: bool = False  # the job trains on a file; no rollouts feed it

    @property
    def heard(self) -> float | None:
        """Age of the newest contact of any kind."""
        ages = [age for age in (self.status_age, self.completion_age, self.upload_age) if age is not None]
        return min(ages) if ages else None


def explain_wait(facts: Facts) -> dict[str, Any]:
    """`state` and `headline` of the whole, and `parts`: state and text of each part of the loop."""
    state, headline = _whole(facts)
    parts = [
        {"part": "rollouts", **_told(*_rollouts(facts))},
        {"part": "batch", **_told(*_batch(facts))},
        {"part": "engine", **_told(*_engine(facts))},
        {"part": "trainer", **_told(*_trainer(facts))},
    ]
    return {"object": "fine_tuning.job.waiting", "state": state, "headline": headline, "parts": parts}


def span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _told(state: State, text: str) -> dict[str, str]:
    return {"state": state, "text": text}


def _whole(facts: Facts) -> tuple[State, str]:
    match facts.job_status:
        case "succeeded" | "failed" | "cancelled":
            return "over", facts.reason or facts.job_status
        case "queued":
            if facts.reason.startswith(FOR_MEMORY):
                return "waiting", "W" + facts.reason[1:].partition(";")[0]
            return (
                "waiting",
                f"Waits for a place: {facts.places} {'job' if facts.places == 1 else 'jobs'} may run at a time",
            )
        case "paused":
            return "waiting", "Paused by request; resume it to go on"
        case "loading":
            return "working", f"Loads the model: {facts.detail}" if facts.detail else "Loads the model"
        case "training":
            return "working", f"Trains: {facts.detail or facts.reason}"
    if facts.has_file:
        return "working", facts.reason or "Trains on its file"
    return _rollouts(facts)


def _rollouts(facts: Facts) -> tuple[State, str]:
    if facts.job_status in ("succeeded", "failed", "cancelled"):
        return "over", "No more samples are taken"
    if facts.has_file:
        return "over", "None are needed: the job trains on a file"
    if facts.heard is None:
        state: State = "stalled" if facts.job_status == "waiting_for_samples" else "waiting"
        return state, (
            f"No rollout program was heard since the server started, {span(facts.seconds_up)} ago. Start one with "
            f"TOKENFACTORY_ROLLOUT_JOB_ID={facts.job_id}"
        )
    if facts.active or facts.queued:
        waiting = f", {facts.queued} more wait" if facts.queued else ""
        return "working", f"Rollouts ask the model: {facts.active} requests are being answered{waiting}"
    if facts.heard > QUIET:
        return (
            "stalled",
            f"No rollout program was heard for {span(facts.heard)}: it has ended, hangs or cannot reach the server",
        )
    quiet = min(age for age in (facts.completion_age, facts.upload_age, facts.seconds_up) if age is not None)
    if quiet > QUIET and facts.job_status == "waiting_for_samples":
        return "stalled", (
            f"The rollout program asks for the job's state, but for {span(quiet)} it neither asked the model nor sent samples: "
            "a rollout function or a grader is still running or hangs"
        )
    return "working", f"A rollout program was heard {span(facts.heard)} ago"


def _batch(facts: Facts) -> tuple[State, str]:
    if facts.job_status in ("succeeded", "failed", "cancelled"):
        return "over", f"{facts.batch_index} batches were filled"
    if facts.has_file:
        return "working", f"All {facts.batch_index} batches are in the job's file"
    last = "" if facts.upload_age is None else f"; the last upload came {span(facts.upload_age)} ago"
    text = f"Batch {facts.batch_index} holds {facts.in_batch} of {facts.batch_size} samples{last}"
    return ("waiting" if facts.job_status == "waiting_for_samples" else "working"), text


def _engine(facts: Facts) -> tuple[State, str]:
    if facts.phase is None:
        return ("over" if facts.job_status in ("succeeded", "failed", "cancelled") else "waiting"), "No worker runs"
    if facts.phase in ("loading", "compiling"):
        return "working", facts.detail or "Starts"
    if facts.active or facts.queued:
        return "working", f"{facts.active} requests at {facts.tokens_per_second:.0f} tokens/s, {facts.queued} wait"
    return "waiting", "Nothing is asked of it"


def _trainer(facts: Facts) -> tuple[State, str]:
    if facts.job_status in ("succeeded", "failed", "cancelled"):
        return "over", facts.reason or facts.job_status
    if facts.phase in ("training", "saving"):
        return "working", facts.detail or facts.phase.capitalize()
    if facts.phase is None:
        return "waiting", "No worker runs"
    if facts.job_status == "waiting_for_samples":
        return "waiting", f"Waits for {facts.batch_size - facts.in_batch} more samples"
    return "waiting", facts.reason or facts.job_status
