"""RL jobs: status, batches, samples, inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from upweight.api_client._responses import parse
from upweight.api_client.models._base import to_body
from upweight.api_client.models.rl_job import Batch, CreateBatchRequest, JobStatus, Sample, UploadSamplesRequest
from upweight.api_client.resources._base import JobCollection, JobResource, Resource, present
from upweight.api_client.resources.inference import Inference

UPLOAD_TIMEOUT_S = 60.0  # long samples by the hundred are megabytes; the client's 5 s would cut them off


class Batches(JobResource):
    PATH_SEGMENT = "batches"

    def create(self, *, job_id: str, index: int) -> Batch:
        """Open batch `index`; opening it again returns it as it is."""
        body = to_body(CreateBatchRequest(index=index))
        return parse(Batch, self._client.post(self.endpoint(job_id=job_id), json=body))

    def get(self, *, job_id: str, batch_index: int) -> Batch:
        """Raises `NotFoundError` for a batch that was not opened."""
        return parse(Batch, self._client.get(f"{self.endpoint(job_id=job_id)}/{batch_index}"))

    def submit_samples(self, *, job_id: str, batch_index: int, samples: Sequence[Sample]) -> Batch:
        """Store samples, exactly once by their ids; all or none of them (409 if they do not fit)."""
        body = UploadSamplesRequest(samples=list(samples)).model_dump_json()  # compact, and fast for long lists
        return self._submit(job_id, batch_index, body.encode())

    def submit_encoded(self, *, job_id: str, batch_index: int, samples: Sequence[bytes]) -> Batch:
        """The same for samples that are JSON objects already."""
        parts = [b'{"samples":[', *(part for sample in samples for part in (b",", sample)), b"]}"]
        del parts[1:2]  # the first comma
        return self._submit(job_id, batch_index, b"".join(parts))

    def _submit(self, job_id: str, batch_index: int, body: bytes) -> Batch:
        url, headers = f"{self.endpoint(job_id=job_id)}/{batch_index}/samples", {"Content-Type": "application/json"}
        return parse(Batch, self._client.post(url, content=body, headers=headers, timeout=UPLOAD_TIMEOUT_S))


class Jobs(JobCollection):
    PATH_SEGMENT = "jobs"

    @cached_property
    def batches(self) -> Batches:
        return Batches(self._client, self)

    @cached_property
    def inference(self) -> Inference:
        return Inference(self._client, self)

    def get_runtime_status(self, *, job_id: str) -> JobStatus:
        return parse(JobStatus, self._client.get(f"{self.endpoint(job_id=job_id)}/status"))

    def post_metrics(self, *, job_id: str, batch_index: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Report scores that the client measured, as of `batch_index` filled batches."""
        body = {"batch_index": batch_index, "metrics": dict(metrics)}
        answer: dict[str, Any] = self._client.post(f"{self.endpoint(job_id=job_id)}/metrics", json=body).json()
        return answer

    def render(
        self,
        *,
        job_id: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> dict[str, Any]:
        """Messages → `{"token_ids": [int], "text": str}` by the model's own chat template and tokenizer."""
        body = present(messages=list(messages), tools=tools, add_generation_prompt=add_generation_prompt)
        answer: dict[str, Any] = self._client.post(f"{self.endpoint(job_id=job_id)}/render", json=body).json()
        return answer


class FineTuning(Resource):
    PATH_SEGMENT = "fine_tuning"

    @cached_property
    def jobs(self) -> Jobs:
        return Jobs(self._client, self)


class V1Alpha1(Resource):
    PATH_SEGMENT = "v1alpha1"

    @cached_property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self._client, self)
