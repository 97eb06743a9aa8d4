"""Where a run takes up an earlier one: the samples that one left in the spool are sent first, then the open batch is read.

Invariant: a failure that may pass is waited out, `upload_timeout` for the samples and `job_init_timeout` for the batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import httpx

from upweight.api_client import APIError, BadRequestError, TokenFactory
from upweight.rollout.batches import (
    CONFLICT,
    MAX_BYTES,
    TOO_LARGE,
    UNPROCESSABLE,
    UploadPlan,
    check_capacity,
    check_full,
    check_told_size,
    is_refused_with,
    open_batch,
    told_batch_size,
    within_bytes,
)
from upweight.rollout.config import RolloutConfig
from upweight.rollout.exceptions import JobInitializationTimeout, UploadFailed
from upweight.rollout.spool import Spool
from upweight.rollout.startup import LEAST_TRY_S, tried_on
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
        timeout = config.job_init_timeout
        raise JobInitializationTimeout(job_id=config.job_id, timeout_seconds=timeout, last_exception=error) from error


def _position(api_client: TokenFactory, config: RolloutConfig, num_batches: int | None) -> tuple[int, int]:
    index = api_client.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=config.job_id).filled_batches
    if num_batches is not None and index >= num_batches:  # filled by what was spooled
        return index - 1, index * config.batch_size
    batch = open_batch(api_client, config.job_id, index)
    check_capacity(config.batch_size, batch)
    check_full(api_client, config.job_id, config.batch_size, batch)
    return index, index * config.batch_size + (batch.sample_count or 0)


@dataclass
class Resumed:
    """What became of the `samples` that an earlier run had not sent for certain.

    `stored_before` had arrived; `dropped` have become too stale or found no place; `refused` are put aside on disk.
    """

    samples: int = 0
    stored_before: int = 0
    dropped: int = 0
    refused: int = 0


@dataclass(frozen=True)
class _Step:
    """One request: the samples in it, those that are too stale by now, how many had been stored, and why it was refused."""

    chunk: Sequence[StampedSample]
    stale: Sequence[StampedSample]
    stored_before: int = 0
    refusal: BadRequestError | None = None


class SpoolSender:
    """Sends what an earlier run left behind.

    The server may have stored some of it already, so each chunk is placed by the server's own count.
    """

    def __init__(self, api_client: TokenFactory, plan: UploadPlan, spool: Spool, stopping: threading.Event) -> None:
        self._api, self._plan, self._spool, self._stopping = api_client, plan, spool, stopping
        self._left: list[StampedSample] = []
        self._max_bytes = MAX_BYTES
        self._is_file_by_file = False
        self._is_warned = False
        self.resumed = Resumed()

    def send(self) -> Resumed:
        """Send all of it.

        Raises:
            Stopped: a stop was asked for; what is unsent stays on disk, also in the cases below.
            UploadFailed: with the samples still unsent.
            BatchSizeMismatch: the server tells another size.
        """
        job_id = self._plan.job_id
        self._left = self._spool.load()
        if not self._left:
            return self.resumed
        self.resumed.samples = len(self._left)
        logger.info("Job %s: %d samples of an earlier run are sent first", job_id, len(self._left))
        while self._left:
            what = f"Job {job_id}: sending {len(self._left)} samples of an earlier run"
            try:
                step = tried_on(
                    self._step, what=what, limit=self._plan.timeout, stopping=self._stopping, least=LEAST_TRY_S
                )
            except (APIError, httpx.HTTPError, TimeoutError) as error:
                unsent = [sample.to_wire() for sample in self._left]
                raise UploadFailed(f"Job {job_id}: spooled samples were not sent: {error}", unsent) from error
            self._settle(step)
        self._tell()
        return self.resumed

    def _step(self) -> _Step:
        """Fill the open batch."""
        plan, jobs = self._plan, self._api.v1alpha1.fine_tuning.jobs
        index = jobs.get_runtime_status(job_id=plan.job_id).filled_batches
        is_open = plan.num_batches is None or index < plan.num_batches
        taken = (open_batch(self._api, plan.job_id, index).sample_count or 0) if is_open else 0
        place = index * plan.batch_size + taken
        fitting = [sample for sample in self._left if plan.fits(sample, place)]
        stale = [sample for sample in self._left if not plan.fits(sample, place)]
        chunk = self._chunk(fitting[: plan.batch_size - taken])
        if not chunk:
            return _Step(chunk, stale)
        bodies = [sample.body for sample in chunk]
        try:
            batch = jobs.batches.submit_encoded(job_id=plan.job_id, batch_index=index, samples=bodies)
        except BadRequestError as error:
            if is_refused_with(error, TOO_LARGE) or is_refused_with(error, UNPROCESSABLE):
                return _Step(chunk, stale, refusal=error)
            if is_refused_with(error, CONFLICT):
                check_told_size(plan.batch_size, told_batch_size(error))
            raise
        count = taken + len(chunk) if batch.sample_count is None else batch.sample_count
        return _Step(chunk, stale, min(len(chunk), max(0, taken + len(chunk) - count)))

    def _chunk(self, fitting: Sequence[StampedSample]) -> list[StampedSample]:
        chunk = within_bytes(fitting, self._max_bytes)
        if not self._is_file_by_file or not chunk:
            return chunk
        first = self._spool.file_of(chunk[0])
        return list(takewhile(lambda sample: self._spool.file_of(sample) == first, chunk))

    def _settle(self, step: _Step) -> None:
        self._forget(step.stale)
        self.resumed.dropped += len(step.stale)
        files = {self._spool.file_of(sample) for sample in step.chunk}
        if step.refusal is None:
            self._forget(step.chunk)
            self.resumed.stored_before += step.stored_before
        elif is_refused_with(step.refusal, TOO_LARGE) and len(step.chunk) > 1:
            self._max_bytes = sum(len(sample.body) for sample in step.chunk) // 2
        elif len(files) > 1:
            self._is_file_by_file = True  # to find the one that it does not like
        else:
            self._set_aside(files.pop(), step.refusal)

    def _forget(self, samples: Sequence[StampedSample]) -> None:
        self._spool.remove(samples)
        done = {sample.id for sample in samples}
        self._left = [sample for sample in self._left if sample.id not in done]

    def _set_aside(self, file: Path | None, refusal: BadRequestError) -> None:
        assert file is not None, "what is left is on disk"
        group = {sample.id for sample in self._left if self._spool.file_of(sample) == file}
        self._left = [sample for sample in self._left if sample.id not in group]
        self.resumed.refused += len(group)
        aside = self._spool.set_aside(file)
        if not self._is_warned:
            self._is_warned = True
            logger.warning(
                "Job %s: the server refuses samples of an earlier run (%s); they are kept in %s and not sent again",
                *(self._plan.job_id, refusal, aside),
            )

    def _tell(self) -> None:
        r = self.resumed
        lost = r.dropped + r.refused
        # A warning, so that a script without any logging set up shows it. None is doubled: the server keeps one of an id.
        logger.warning(
            "Job %s resumed: of %d samples of an earlier run %d were stored already, %d are stored now, %d have become too "
            "stale or found no place, %d were refused; %d lost, 0 doubled",
            *(self._plan.job_id, r.samples, r.stored_before, r.samples - r.stored_before - lost, r.dropped, r.refused),
            lost,
        )
