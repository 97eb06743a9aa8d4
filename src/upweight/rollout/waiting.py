"""What a run waits for, in words."""

from __future__ import annotations

from upweight.rollout.dispatcher import RolloutDispatcher
from upweight.rollout.outage import Outage
from upweight.rollout.tasks import TaskSource
from upweight.rollout.uploader import Uploader
from upweight.rollout.waits import rollouts_in_words
from upweight.schedulers import BaseRolloutScheduler

NAMED = 5  # rollouts whose ids are told


def what_is_awaited(
    uploader: Uploader,
    dispatcher: RolloutDispatcher,
    scheduler: BaseRolloutScheduler,
    source: TaskSource,
    evaluating: int | None,
    outage: Outage,
) -> str:
    """Everything under way; if there is nothing, the version without which nothing may start. `evaluating`: a version."""
    parts = [outage.in_words()] if outage.is_on else []
    if uploader.backlog:
        error = f" (last error: {uploader.last_error})" if uploader.last_error else ""
        parts.append(f"upload of {uploader.backlog} samples{error}")
    if n_running := dispatcher.n_running:
        parts.append(rollouts_in_words(n_running, dispatcher.oldest(NAMED), source.numbers))
    elif n_retries := scheduler.n_in_flight - dispatcher.n_doubtful:
        parts.append(f"retries of {n_retries} rollouts")
    if blocked := dispatcher.blocked:
        parts.append(blocked)
    if dispatcher.n_doubtful:
        parts.append(f"the status, since {dispatcher.n_doubtful} groups report a version newer than the known ones")
    if source.is_drawing:
        parts.append("tasks from the dataset")
    if evaluating is not None:
        parts.append(f"the evaluation of version {evaluating}")
    if not parts:
        free = scheduler.config.batch_size - scheduler.samples_in_current_batch
        batch = f"batch {scheduler.current_batch_index} has {free} free places"
        parts.append(f"a version above {scheduler.inference_version} ({batch})")
    return "; ".join(parts)
