"""Polls the job's status: until it serves, and then for news.

Invariants
1. Polls are at least 10 ms apart; only changes are forwarded.
2. `served` is one object, replaced as a whole: other threads may read it.
3. A job that cannot be reached for `failure_timeout` s, refuses us, or ended is reported once; then polling stops.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue
from typing import Any

import httpx

from upweight.api_client import APIError, TokenFactory
from upweight.api_client._retry import call_limits, is_refusal
from upweight.api_client.models.rl_job import JobStatus
from upweight.rollout import waits
from upweight.rollout.exceptions import JobInitializationTimeout, JobNotServing, JobUnavailable
from upweight.rollout.messages import Broken, JobEnded
from upweight.rollout.models import JobStatusUpdate
from upweight.rollout.startup import LEAST_TRY_S, Stopped, call_in_time

logger = logging.getLogger(__name__)

MIN_POLL_INTERVAL_S = 0.01


def end_of_job(job_id: str, status: JobStatus) -> JobEnded | None:
    """The terminal state that a status tells, with the job's own error; None if the job goes on or tells no state."""
    extra = status.model_extra or {}
    state = extra.get("job_status")
    if state in ("failed", "cancelled"):
        return JobEnded(JobUnavailable(f"Job {job_id} {state}: {extra.get('error')}"))
    return JobEnded(None) if state == "succeeded" else None


def wait_until_ready(
    api_client: TokenFactory,
    job_id: str,
    timeout: float | None,
    poll_interval: float,
    stopping: threading.Event,
    is_full: Callable[[JobStatus], bool] = lambda status: False,
) -> JobStatus | None:
    """Poll until the status tells a version, or that nothing is left to do; None if `stopping` was set.

    Raises:
        JobInitializationTimeout: after `timeout` s (0 = one try), or at once when the server refuses.
        JobUnavailable: the job failed or was cancelled.
    """
    began = time.monotonic()
    deadline = None if timeout is None else began + timeout
    last_error: Exception | None = None
    warned = began
    while not stopping.is_set():
        try:
            status = call_in_time(
                lambda: api_client.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=job_id),
                what=f"Job {job_id}: asking for its status",
                deadline=deadline if timeout else None,
                stopping=stopping,
                one_try=timeout == 0,
            )
            ended = end_of_job(job_id, status)
            if ended is not None and ended.error is not None:
                raise ended.error
            if ended is not None or status.inference_version is not None or is_full(status):
                return status
            last_error = JobNotServing("inference_version is still null")
        except Stopped:
            return None
        except TimeoutError as error:
            last_error = last_error or error
        except (APIError, httpx.HTTPError) as error:
            last_error = error
        if is_refusal(last_error) or (deadline is not None and time.monotonic() >= deadline):
            raise JobInitializationTimeout(job_id=job_id, timeout_seconds=timeout, last_exception=last_error)
        if time.monotonic() - warned >= waits.WARN_EVERY_S:
            warned = time.monotonic()
            logger.warning("Job %s does not serve since %.0f s: %s", job_id, warned - began, last_error)
        left = poll_interval if deadline is None else min(poll_interval, deadline - time.monotonic())
        stopping.wait(max(MIN_POLL_INTERVAL_S, left))
    return None


@dataclass(frozen=True)
class Served:
    """`newest` is the largest version that the job ever told, `polls` how many answers it has given."""

    newest: int
    polls: int = 0


class JobStatusTracker(threading.Thread):
    """Puts a `JobStatusUpdate` for each new version; null versions are not forwarded. Times are in seconds."""

    def __init__(
        self,
        job_id: str,
        api_client: TokenFactory,
        output_queue: Queue[Any],
        poll_interval: float = 1.0,
        *,
        failure_timeout: float | None = None,
    ) -> None:
        if poll_interval < 0:
            raise ValueError(f"poll_interval must be ≥ 0, got {poll_interval}")
        super().__init__(name="rollout-tracker", daemon=True)
        self._job_id = job_id
        self._api = api_client
        self._output = output_queue
        self._interval = max(MIN_POLL_INTERVAL_S, poll_interval)
        self._failure_timeout = failure_timeout
        self._stopping = threading.Event()
        self._last_version: int | None = None
        self._failing_since: float | None = None
        self.served = Served(-1)

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            while not self._stopping.is_set() and self._poll():
                self._stopping.wait(self._interval)
        except Exception as error:  # a thread that dies must not leave the main loop waiting
            logger.exception("The job status tracker died")
            self._output.put(Broken(error))

    def _poll(self) -> bool:
        """One poll; False when there is no point in polling on."""
        began = time.monotonic()
        give_up = None if self._failure_timeout is None else (self._failing_since or began) + self._failure_timeout
        try:
            with call_limits(deadline=give_up, cancelled=self._stopping, least=LEAST_TRY_S):
                status = self._api.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=self._job_id)
        except (APIError, httpx.HTTPError) as error:
            return self._note_failure(began, error)
        self._failing_since = None
        if status.inference_version is not None and status.inference_version != self._last_version:
            self._last_version = status.inference_version
            self._output.put(JobStatusUpdate(inference_version=status.inference_version))
        known = -1 if status.inference_version is None else status.inference_version
        # After the message, so that the main loop learns of a version before it gets samples of it.
        self.served = Served(max(self.served.newest, known), self.served.polls + 1)
        return self._note_state(status)

    def _note_failure(self, began: float, error: Exception) -> bool:
        if self._stopping.is_set():
            return False
        if self._failing_since is None:
            self._failing_since = began
            logger.warning("Job %s: status poll failed: %s: %s", self._job_id, type(error).__name__, error)
        failing_for = time.monotonic() - self._failing_since
        is_over = self._failure_timeout is not None and failing_for >= self._failure_timeout
        if not is_over and not is_refusal(error):
            return True
        lost = JobUnavailable(f"Job {self._job_id}: no status for {failing_for:.1f} s; last error: {error}")
        lost.__cause__ = error
        self._output.put(JobEnded(lost))
        return False

    def _note_state(self, status: JobStatus) -> bool:
        ended = end_of_job(self._job_id, status)
        if ended is not None:
            self._output.put(ended)
        return ended is None
