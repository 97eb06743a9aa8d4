"""Where a run takes up an earlier one: the samples that one left in the spool are sent first, then the open batch is read.

Invariant: a failure that may pass is waited out, `upload_timeout` for the samples and `job_init_timeout` for the batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from upweight.api_client import APIError, BadRequestError, TokenFactory
from upweight.rollout.batches import (
    CONFLICT,
    MAX_BYTES,
    TOO_LARGE,
    UploadPlan,
    check_capacity,
    check_told_size,
    is_refused_with,
    open_batch,
    told_batch_size,
    within_bytes,
)
from upweight.rollout.config import RolloutConfig
from upweight.rollout.exceptions import JobInitializationTimeout, UploadFailed
from upweight.rollout.spool import Spool
from upweight.rollout.startup import tried_on
from upweight.rollout.validation import StampedSample

logger = logging.getLogger(__name__)


def find_position(
    api_client: TokenFactory,
    config: RolloutConfig,
    num_batches: int | None,
    *,
    seconds: float | None,
    stopping: threading.Event,
) -> tuple[int, int]:
    """The last open batch (opened here if need be), and the number of places taken in all batches.

    `seconds` are left for it; None = any time, 0 = one try.

    Raises:
        Stopped: `stopping` was set.
        JobInitializationTimeout: the server refuses, or fails for all that time.
        BatchSizeMismatch: the batch shows another size.
    """
    what = f"Job {config.job_id}: reading the open batch"
    try:
        return tried_on(lambda: _position(api_client, config, num_batches), what=what, limit=seconds, stopping=stopping)
    except (APIError, httpx.HTTPError, TimeoutError) as error:
        timeout = config.job_init_timeout or 0
        raise JobInitializationTimeout(job_id=config.job_id, timeout_seconds=timeout, last_exception=error) from error


def _position(api_client: TokenFactory, config: RolloutConfig, num_batches: int | None) -> tuple[int, int]:
    index = api_client.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=config.job_id).filled_batches
    if num_batches is not None and index >= num_batches:  # filled by what was spooled
        return index - 1, index * config.batch_size
    batch = open_batch(api_client, config.job_id, index)
    check_capacity(config.batch_size, batch)
    return index, index * config.batch_size + (batch.sample_count or 0)


@dataclass(frozen=True)
class Resumed:
    """What became of the samples that an earlier run had not sent for certain; `stored_before` of them had arrived."""

    samples: int = 0
    stored_before: int = 0
    dropped: int = 0


def send_spooled(api_client: TokenFactory, plan: UploadPlan, spool: Spool, stopping: threading.Event) -> Resumed:
    """Send what an earlier run left behind.

    The server may have stored some of them already, so each chunk is placed by the server's own count.

    Raises:
        Stopped: `stopping` was set; what is unsent stays on disk, also in the cases below.
        UploadFailed: with the samples still unsent.
        BatchSizeMismatch: the server tells another size.
    """
    left = spool.load()
    if not left:
        return Resumed()
    total, stored_before, dropped, max_bytes = len(left), 0, 0, MAX_BYTES
    logger.info("Job %s: %d samples of an earlier run are sent first", plan.job_id, total)
    while left:
        try:
            sent, stale, known = _send_in_time(api_client, plan, left, max_bytes, stopping)
        except (APIError, httpx.HTTPError, TimeoutError) as error:
            if is_refused_with(error, TOO_LARGE) and max_bytes > 1:
                max_bytes //= 2
                continue
            unsent = [sample.to_wire() for sample in left]
            raise UploadFailed(f"Job {plan.job_id}: spooled samples were not sent: {error}", unsent) from error
        done = {sample.id for sample in [*sent, *stale]}
        spool.remove([*sent, *stale])
        left = [sample for sample in left if sample.id not in done]
        stored_before += known
        dropped += len(stale)
    new = total - stored_before - dropped
    logger.info(
        "Job %s resumed: of %d samples of an earlier run %d were stored already, %d are stored now, %d have become too "
        "stale or found no place; %d lost, 0 doubled",  # doubled: the server keeps one sample of an id
        *(plan.job_id, total, stored_before, new, dropped, dropped),
    )
    return Resumed(total, stored_before, dropped)


_Sent = tuple[Sequence[StampedSample], Sequence[StampedSample], int]


def _send_in_time(
    api_client: TokenFactory,
    plan: UploadPlan,
    left: Sequence[StampedSample],
    max_bytes: int,
    stopping: threading.Event,
) -> _Sent:
    what = f"Job {plan.job_id}: sending {len(left)} samples of an earlier run"
    return tried_on(
        lambda: _send_some(api_client, plan, left, max_bytes), what=what, limit=plan.timeout, stopping=stopping
    )


def _send_some(api_client: TokenFactory, plan: UploadPlan, left: Sequence[StampedSample], max_bytes: int) -> _Sent:
    """Fill the open batch from `left`; returns what was sent, what is too stale by now, and how many had been stored."""
    jobs = api_client.v1alpha1.fine_tuning.jobs
    index = jobs.get_runtime_status(job_id=plan.job_id).filled_batches
    is_open = plan.num_batches is None or index < plan.num_batches
    taken = (open_batch(api_client, plan.job_id, index).sample_count or 0) if is_open else 0
    place = index * plan.batch_size + taken
    fitting = [sample for sample in left if plan.fits(sample, place)]
    stale = [sample for sample in left if not plan.fits(sample, place)]
    chunk = within_bytes(fitting[: plan.batch_size - taken], max_bytes)
    if not chunk:
        return chunk, stale, 0
    bodies = [sample.body for sample in chunk]
    try:
        batch = jobs.batches.submit_encoded(job_id=plan.job_id, batch_index=index, samples=bodies)
    except BadRequestError as error:
        if is_refused_with(error, CONFLICT):
            check_told_size(plan.batch_size, told_batch_size(error))
        raise
    count = taken + len(chunk) if batch.sample_count is None else batch.sample_count
    return chunk, stale, min(len(chunk), max(0, taken + len(chunk) - count))
