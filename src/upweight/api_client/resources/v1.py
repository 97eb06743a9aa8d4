"""Fine-tuning jobs: create, watch, cancel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from upweight.api_client._outage import Outage
from upweight.api_client._responses import parse
from upweight.api_client._retry import call_limits, is_retryable
from upweight.api_client.models import fine_tuning as models
from upweight.api_client.models._base import to_body
from upweight.api_client.resources._base import JobCollection, JobResource, Resource, present
from upweight.api_client.resources.files import Files

LEAST_LOOK_S = 1.0  # that a look has, however near the end of a wait is
FINAL_STATES = (models.Status.succeeded, models.Status.failed, models.Status.cancelled)
SingleCheckpoint = models.OpenaiTypesFineTuningJobsFineTuningJobCheckpointFineTuningJobCheckpoint


class Checkpoints(JobResource):
    PATH_SEGMENT = "checkpoints"

    def list(
        self, *, job_id: str, limit: int | None = None, after: str | None = None
    ) -> models.ListCheckpointsResponse:
        """Newest first; `after` is the id of the last one already seen."""
        response = self._client.get(self.endpoint(job_id=job_id), params=present(limit=limit, after=after))
        return parse(models.ListCheckpointsResponse, response)

    def iterate(self, *, job_id: str) -> Iterator[models.AppModelsFineTuningFineTuningJobCheckpoint]:
        """All checkpoints of a job, page by page."""
        after = None
        while True:
            page = self.list(job_id=job_id, after=after)
            yield from page.data
            if not page.has_more or not page.data:
                return
            after = page.data[-1].id

    def get(self, *, job_id: str, checkpoint_id: str) -> SingleCheckpoint:
        return parse(SingleCheckpoint, self._client.get(f"{self.endpoint(job_id=job_id)}/{checkpoint_id}"))


class Jobs(JobCollection):
    PATH_SEGMENT = "jobs"

    @cached_property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self._client, self)

    def create(
        self,
        *,
        model: str,
        training_file: str,
        ai_project_id: str | None = None,
        from_checkpoint: models.CheckpointRequest | dict[str, Any] | None = None,
        validation_file: str | None = None,
        hyperparameters: models.SupervisedHParameters | dict[str, Any] | None = None,
        method: models.SupervisedMethodConfig | models.SpecDraftMethodConfig | dict[str, Any] | None = None,
        integrations: list[Any] | None = None,
        seed: int | None = None,
        suffix: str | models.Suffix1 | None = None,
        tags: list[str] | None = None,
        extra_body: dict[str, Any] | None = None,
    ) -> models.FineTuningJob:
        """Create a job. `method` may be a plain dictionary, `{"type": "reinforcement", "reinforcement": {…}}` for RL.

        `extra_body` is sent as an object under that name.
        """
        request = models.FineTuningRequest.model_validate(
            {
                "model": model,
                "training_file": training_file,
                "from_checkpoint": from_checkpoint,
                "validation_file": validation_file,
                "hyperparameters": hyperparameters,
                "method": method,
                "integrations": integrations,
                "seed": seed,
                "suffix": suffix,
                "tags": tags,
                "extra_body": extra_body,
            }
        )
        query = present(ai_project_id=ai_project_id)
        response = self._client.post(self.bare_endpoint(), json=to_body(request), params=query)
        return parse(models.FineTuningJob, response)

    def list(
        self, *, limit: int | None = None, after: str | None = None, ai_project_id: str | None = None
    ) -> models.FineTuningJobListResponse:
        """Newest first; `after` is the id of the last one already seen."""
        query = present(limit=limit, after=after, ai_project_id=ai_project_id)
        return parse(models.FineTuningJobListResponse, self._client.get(self.bare_endpoint(), params=query))

    def iterate(self, *, ai_project_id: str | None = None) -> Iterator[models.FineTuningJob]:
        """All jobs, page by page."""
        after = None
        while True:
            page = self.list(after=after, ai_project_id=ai_project_id)
            yield from page.data
            if not page.has_more or not page.data:
                return
            after = page.data[-1].id

    def iterate_events(self, *, job_id: str) -> Iterator[models.FineTuningJobEvent]:
        """All events of a job, page by page."""
        after = None
        while True:
            page = self.get_events(job_id=job_id, after=after)
            yield from page.data
            if not page.has_more or not page.data:
                return
            after = page.data[-1].id

    def wait(self, *, job_id: str, timeout: float | None = None, poll_interval: float = 2.0) -> models.FineTuningJob:
        """Poll until the job succeeded, failed or was cancelled; times in seconds.

        A server that does not answer for a while is waited for: the job goes on without it. Each outage is logged, and its end.

        Raises:
            TimeoutError: it is still going on after `timeout`.
            APIError: the server refuses to tell, now and later: an unknown job, say, or a wrong key.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        outage = Outage(f"job {job_id}")
        while True:
            job = self._look(job_id, deadline, outage)
            if job is not None and job.status in FINAL_STATES:
                return job
            if deadline is not None and time.monotonic() >= deadline:
                if job is None:
                    raise TimeoutError(f"Job {job_id}: {outage}; gave up after {timeout} s") from outage.error
                status = getattr(job.status, "value", job.status)  # unknown ones are plain text
                raise TimeoutError(f"Job {job_id} is still {status} after {timeout} s")
            time.sleep(poll_interval if deadline is None else max(0.0, min(poll_interval, deadline - time.monotonic())))

    def _look(self, job_id: str, deadline: float | None, outage: Outage) -> models.FineTuningJob | None:
        """The job, or None when the server did not answer but may later."""
        try:
            with call_limits(deadline=deadline, least=LEAST_LOOK_S) if deadline is not None else nullcontext():
                job = self.get(job_id=job_id)
        except Exception as error:  # which of them may pass, `is_retryable` knows
            if not is_retryable(error):
                raise
            outage.note(error)
            return None
        outage.end()
        return job

    def wait_for_job(
        self, *, job_id: str, timeout: float | None = None, poll_interval: float = 2.0
    ) -> models.FineTuningJob:
        """The same as `wait`."""
        return self.wait(job_id=job_id, timeout=timeout, poll_interval=poll_interval)

    def get(self, *, job_id: str) -> models.FineTuningJob:
        return parse(models.FineTuningJob, self._client.get(self.endpoint(job_id=job_id)))

    def cancel(self, *, job_id: str) -> models.FineTuningJob:
        return parse(models.FineTuningJob, self._client.post(f"{self.endpoint(job_id=job_id)}/cancel"))

    def get_events(
        self, *, job_id: str, limit: int | None = None, after: str | None = None
    ) -> models.ListEventsResponse:
        query = present(limit=limit, after=after)
        response = self._client.get(f"{self.endpoint(job_id=job_id)}/events", params=query)
        return parse(models.ListEventsResponse, response)


class FineTuning(Resource):
    PATH_SEGMENT = "fine_tuning"

    @cached_property
    def jobs(self) -> Jobs:
        return Jobs(self._client, self)


class V1(Resource):
    PATH_SEGMENT = "v1"

    @cached_property
    def files(self) -> Files:
        return Files(self._client, self)

    @cached_property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self._client, self)
