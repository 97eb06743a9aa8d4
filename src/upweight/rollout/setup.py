"""From a config and the server's state to the parts of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Queue
from typing import Any

from upweight.api_client.models.rl_job import JobStatus
from upweight.rollout.batches import UploadPlan, check_told_size
from upweight.rollout.config import RolloutConfig
from upweight.rollout.context import RolloutContext
from upweight.rollout.dispatcher import RolloutDispatcher
from upweight.rollout.evaluation import EvaluationPlan, EvaluationSchedule, Evaluator
from upweight.rollout.tracker import Served
from upweight.schedulers import BaseRolloutScheduler, RolloutSchedulerConfig, create_rollout_scheduler

logger = logging.getLogger(__name__)


def effective_batches(config: RolloutConfig, status: JobStatus) -> int | None:
    """The smaller one of our `num_batches` and the job's `total_batches`; None = without end.

    Raises:
        BatchSizeMismatch: the status tells another `batch_size`.
    """
    check_told_size(config.batch_size, (status.model_extra or {}).get("batch_size"))
    ours, theirs = config.num_batches, status.total_batches
    if ours is not None and theirs is not None and ours != theirs:
        logger.warning("num_batches is %d here but the job takes %d; the smaller one counts", ours, theirs)
    return min((n for n in (ours, theirs) if n is not None), default=None)


def make_scheduler(
    config: RolloutConfig, num_batches: int | None, position: int, status: JobStatus
) -> BaseRolloutScheduler:
    """A scheduler that goes on at `position`, at the version that a ready job's status tells."""
    scheduler = create_rollout_scheduler(
        RolloutSchedulerConfig(
            batch_size=config.batch_size,
            num_batches=num_batches,
            num_samples_per_task=config.num_samples_per_task,
            parallel_rollouts=config.max_concurrency,
            allowed_staleness=config.allowed_staleness,
            drop_stale_trajectories=config.drop_stale_trajectories,
        )
    )
    scheduler.set_initial_batch_index(*divmod(position, config.batch_size))
    assert status.inference_version is not None  # that is what "ready" means
    scheduler.set_inference_version(status.inference_version)
    return scheduler


def upload_plan(config: RolloutConfig, num_batches: int | None) -> UploadPlan:
    return UploadPlan(
        job_id=config.job_id,
        batch_size=config.batch_size,
        num_batches=num_batches,
        staleness=config.allowed_staleness,
        timeout=config.upload_timeout,
    )


def make_evaluation(
    plan: EvaluationPlan | None, context: RolloutContext, output: Queue[Any]
) -> EvaluationSchedule | None:
    if plan is None:
        return None
    evaluator = Evaluator(plan.tasks, plan.eval_fn, context, max(1, context.config.max_concurrency), output)
    return EvaluationSchedule(evaluator, plan.every)


def make_dispatcher(
    rollout_fn: Callable[..., Any],
    context: RolloutContext,
    config: RolloutConfig,
    tasks: Queue[Any],
    output: Queue[Any],
    *,
    current_version: Callable[[], int | None],
    served: Callable[[], Served | None],
) -> RolloutDispatcher:
    """Raises `TypeError` for what cannot be sent to worker processes."""
    return RolloutDispatcher(
        rollout_fn,
        context,
        tasks,
        output,
        concurrent_workers=config.max_concurrency // config.num_samples_per_task,
        num_rollout_retries=config.num_rollout_retries,
        raise_on_rollout_failure=config.raise_on_rollout_failure,
        executor_type=config.executor_type,
        group_size=config.num_samples_per_task,
        rollout_timeout=config.rollout_timeout,
        retry_backoff=config.rollout_retry_backoff,
        max_pool_restarts=config.max_pool_restarts,
        process_start_method=config.process_start_method,
        current_version=current_version,
        served=served,
    )
