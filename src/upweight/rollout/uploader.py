"""Sends accepted samples in order, in a thread of its own.

Invariants
1. A sample is owned here, and on disk with a spool, until the server has acknowledged it; its id never changes.
2. Samples enter places in the order in which they came; a batch never gets more than B of them.
3. When somebody else filled places, a sample still enters no batch beyond its staleness bound: it is dropped, and told.
4. Samples whose upload ended without an answer may be stored or not ("uncertain"). Sent again they count once: where
   their places had been taken for somebody else's, these are given back.
5. A batch is opened as soon as the one before is full, but none after the last.
6. Samples wait at most COLLECT_S for others to travel with, and not at all once they are an eighth of a batch, close it, fill a
   request of MAX_BYTES (less where the server answers 413), or nothing else is coming (`hurry`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from queue import Queue
from typing import Any

import httpx

from upweight.api_client import APIError, BadRequestError, NotFoundError, TokenFactory
from upweight.api_client._retry import call_limits, is_refusal
from upweight.api_client.models.rl_job import Batch
from upweight.rollout.batches import (
    CONFLICT,
    MAX_BYTES,
    TOO_LARGE,
    UploadPlan,
    check_capacity,
    check_full,
    check_told_size,
    is_refused_with,
    open_batch,
    told_batch_size,
    within_bytes,
)
from upweight.rollout.exceptions import BatchSizeMismatch, UploadFailed
from upweight.rollout.messages import Broken, PlacesTaken, Uploaded
from upweight.rollout.spool import Spool
from upweight.rollout.startup import LEAST_TRY_S
from upweight.rollout.validation import StampedSample

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 30.0
COLLECT_S = 0.1
PARTS_OF_A_BATCH = 8


class Uploader(threading.Thread):
    """`position` counts the places of all batches: batch index · B + samples in it; `opened` is the last open batch."""

    def __init__(
        self,
        api_client: TokenFactory,
        plan: UploadPlan,
        position: int,
        output_queue: Queue[Any],
        spool: Spool,
        *,
        opened: int,
    ) -> None:
        super().__init__(name="rollout-uploader", daemon=True)
        self._api = api_client
        self._plan = plan
        self._position = position
        self._output = output_queue
        self._spool = spool
        self._opened = opened
        self._backlog: deque[StampedSample] = deque()
        self._backlog_bytes = 0
        self._max_bytes = MAX_BYTES
        self._waiting_since = 0.0
        self._is_hurried = False
        self._uncertain: set[str] = set()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._failing_since: float | None = None
        self._failures = 0
        self.last_error: str | None = None
        self.staleness: Counter[int] = Counter()

    def put(self, samples: Sequence[StampedSample]) -> None:
        """Take over samples, which are in the spool; ready ones go together, also with those that come meanwhile."""
        with self._changed:
            if not self._backlog:
                self._waiting_since = time.monotonic()
            self._backlog.extend(samples)
            self._backlog_bytes += sum(len(sample.body) for sample in samples)
            self._changed.notify()

    def hurry(self) -> None:
        """Nothing else is coming for now: what is ready need not wait for company."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify()

    @property
    def job_id(self) -> str:
        return self._plan.job_id

    @property
    def backlog(self) -> int:
        return len(self._backlog)

    @property
    def position(self) -> int:
        """Places that the server is known to hold."""
        return self._position

    def unsent(self) -> list[StampedSample]:
        with self._changed:
            return list(self._backlog)

    def stop(self) -> None:
        """End now; what is unsent stays in `unsent()` (and on disk)."""
        self._stopping.set()
        with self._changed:
            self._changed.notify()

    def run(self) -> None:
        try:
            while self._wait_for_work():
                self._try_step()
        except Exception as error:  # a thread that dies must not leave the main loop waiting
            if not isinstance(error, UploadFailed | BatchSizeMismatch):
                logger.exception("The uploader died")
            self._output.put(Broken(error))

    # -- one step

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping.is_set() or self._backlog or self._must_open)
            if not self._must_open:
                company = self._waiting_since + COLLECT_S - time.monotonic()
                self._changed.wait_for(self._is_worth_a_request, timeout=company)
            self._is_hurried = False
        return not self._stopping.is_set()

    def _is_worth_a_request(self) -> bool:
        if self._stopping.is_set() or self._is_hurried or self._backlog_bytes >= self._max_bytes:
            return True
        batch_size, n = self._plan.batch_size, len(self._backlog)
        return n * PARTS_OF_A_BATCH >= batch_size or n >= batch_size - self._position % batch_size

    @property
    def _batch_index(self) -> int:
        return self._position // self._plan.batch_size

    @property
    def _must_open(self) -> bool:
        n = self._plan.num_batches
        return self._batch_index > self._opened and (n is None or self._batch_index < n)

    def _try_step(self) -> None:
        deadline = (self._failing_since or time.monotonic()) + self._plan.timeout
        try:
            with call_limits(deadline=deadline, cancelled=self._stopping, least=LEAST_TRY_S):
                self._step()
            self._failing_since, self._failures, self.last_error = None, 0, None
        except (APIError, httpx.HTTPError) as error:
            self._note_failure(error)

    def _step(self) -> None:
        batches = self._api.v1alpha1.fine_tuning.jobs.batches
        index, taken = divmod(self._position, self._plan.batch_size)
        if self._must_open:
            batch = batches.create(job_id=self._plan.job_id, index=index)
            self._opened = index
            self._note_count(batch, index, taken)
            return
        with self._changed:
            chunk = within_bytes(islice(self._backlog, self._plan.batch_size - taken), self._max_bytes)
        # Samples may have been accepted while the news of others' places was still under way to the scheduler.
        misfits = [sample for sample in chunk if not self._plan.fits(sample, self._position)]
        if misfits:
            self._drop(misfits, 0)
            return
        bodies = [sample.body for sample in chunk]
        try:
            batch = batches.submit_encoded(job_id=self._plan.job_id, batch_index=index, samples=bodies)
        except (APIError, httpx.HTTPError) as error:
            if is_refused_with(error, TOO_LARGE) and len(chunk) > 1:
                self._max_bytes = sum(map(len, bodies)) // 2
                logger.info(
                    "Job %s: the server takes no %d samples at once; fewer are sent", self._plan.job_id, len(chunk)
                )
                return
            if not is_refused_with(error, CONFLICT):
                self._uncertain.update(sample.id for sample in chunk)
                raise
            self._resynchronise(error)
            return
        n_uncertain = len(self._uncertain.intersection(sample.id for sample in chunk))
        self._uncertain.difference_update(sample.id for sample in chunk)
        self._acknowledge(chunk)
        self._note_count(batch, index, taken + len(chunk), n_uncertain)

    def _acknowledge(self, chunk: Sequence[StampedSample]) -> None:
        with self._changed:
            for _ in chunk:
                self._backlog_bytes -= len(self._backlog.popleft().body)
            self._waiting_since = time.monotonic()
        self._spool.remove(chunk)
        self.staleness.update(self._batch_index - 1 - s.version for s in chunk)
        self._position += len(chunk)

    def _note_count(self, batch: Batch, index: int, expected: int, n_uncertain: int = 0) -> None:
        """Compare the server's count with ours: a larger one moves ours up.

        A smaller one is only logged, unless samples that were stored before (uncertain ones) explain it.
        """
        count = expected if batch.sample_count is None else batch.sample_count
        check_capacity(self._plan.batch_size, batch)
        with contextlib.suppress(
            APIError, httpx.HTTPError
        ):  # no answer, no mismatch: the samples are stored either way
            check_full(self._api, self._plan.job_id, self._plan.batch_size, batch)
        if 0 < expected - count <= n_uncertain:
            self._position -= expected - count
            self._output.put(PlacesTaken(count - expected, 0))
        elif count < expected:
            logger.warning("Batch %d: the server counts %d samples, %d were expected", index, count, expected)
        elif count > expected:
            self._make_room(count - expected)
        self._tell()

    def _tell(self) -> None:
        filled, open_samples = divmod(self._position, self._plan.batch_size)
        self._output.put(Uploaded(filled, open_samples))

    # -- somebody else fills the job too

    def _resynchronise(self, refusal: BadRequestError) -> None:
        """After a 409: read where the job stands and go on there."""
        check_told_size(self._plan.batch_size, told_batch_size(refusal))
        jobs, job_id = self._api.v1alpha1.fine_tuning.jobs, self._plan.job_id
        index = jobs.get_runtime_status(job_id=job_id).filled_batches
        n = self._plan.num_batches
        count = 0 if n is not None and index >= n else open_batch(self._api, job_id, index).sample_count or 0
        foreign = index * self._plan.batch_size + count - self._position
        if foreign <= 0:
            raise refusal
        logger.warning("Job %s: %d places were filled by somebody else", job_id, foreign)
        self._opened = max(self._opened, index)
        self._make_room(foreign)
        self._tell()

    def _make_room(self, foreign: int) -> None:
        self._position += foreign
        place, dropped = self._position, []
        with self._changed:
            waiting = list(self._backlog)
        for sample in waiting:
            if self._plan.fits(sample, place):
                place += 1
            else:
                dropped.append(sample)
        self._drop(dropped, foreign)

    def _drop(self, dropped: Sequence[StampedSample], foreign: int) -> None:
        ids = {sample.id for sample in dropped}
        with self._changed:
            kept = [sample for sample in self._backlog if sample.id not in ids]
            self._backlog.clear()
            self._backlog.extend(kept)
            self._backlog_bytes = sum(len(sample.body) for sample in kept)
        self._spool.remove(dropped)
        self._uncertain -= ids
        self._output.put(PlacesTaken(foreign - len(dropped), len(dropped)))

    # -- failures

    def _note_failure(self, error: Exception) -> None:
        if self._stopping.is_set():
            return
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self._failures += 1
        self.last_error = f"{type(error).__name__}: {error}"
        is_conflict = is_refused_with(error, CONFLICT)
        if isinstance(error, NotFoundError):
            self._opened = self._batch_index - 1  # open it again
        failing_for = now - self._failing_since
        if failing_for >= self._plan.timeout or (is_refusal(error) and not is_conflict):
            unsent = self.unsent()
            raise UploadFailed(
                f"Job {self._plan.job_id}: {len(unsent)} samples unsent after {failing_for:.0f} s; last error: {self.last_error}",
                [sample.to_wire() for sample in unsent],
            ) from error
        wait = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (self._failures - 1), self._plan.timeout - failing_for)
        logger.warning("Job %s: upload failed (%s); next try in %.1f s", self._plan.job_id, self.last_error, wait)
        self._stopping.wait(wait)
