"""The batches of a job as uploads see them: which sample may enter which place, and what the server's answers say of its batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

from upweight.api_client import BadRequestError, NotFoundError, TokenFactory
from upweight.api_client.models.rl_job import Batch, BatchStatus
from upweight.rollout.exceptions import BatchSizeMismatch
from upweight.rollout.validation import StampedSample

CONFLICT, TOO_LARGE, UNPROCESSABLE = 409, 413, 422
MAX_BYTES = 16 << 20  # of the samples in one request; one sample goes whatever its size


@dataclass(frozen=True)
class UploadPlan:
    """Where uploads go. `num_batches` and `staleness` None = no bound; `timeout` in seconds of failing in a row."""

    job_id: str
    batch_size: int
    num_batches: int | None
    staleness: int | None
    timeout: float

    def fits(self, sample: StampedSample, place: int) -> bool:
        """Whether a stamped sample may enter a place, by the end of the run and by its staleness."""
        index = place // self.batch_size
        if self.num_batches is not None and index >= self.num_batches:
            return False
        return self.staleness is None or index - 1 - sample.version <= self.staleness


def open_batch(api_client: TokenFactory, job_id: str, index: int) -> Batch:
    """The batch as it is, opened if it was not."""
    batches = api_client.v1alpha1.fine_tuning.jobs.batches
    try:
        return batches.get(job_id=job_id, batch_index=index)
    except NotFoundError:
        return batches.create(job_id=job_id, index=index)


def check_told_size(batch_size: int, told: object) -> None:
    """Raises `BatchSizeMismatch` when the server tells another capacity; one that tells none is fine."""
    if isinstance(told, int) and told != batch_size:
        raise BatchSizeMismatch(f"batch_size is {batch_size} here but {told} on the server; use {told}")


def is_refused_with(error: Exception, status: int) -> TypeGuard[BadRequestError]:
    return isinstance(error, BadRequestError) and error.response is not None and error.response.status_code == status


def told_batch_size(refusal: BadRequestError) -> object:
    try:
        body = refusal.response.json() if refusal.response is not None else None
    except ValueError:
        return None
    return body.get("batch_size") if isinstance(body, dict) else None


def check_capacity(batch_size: int, batch: Batch) -> None:
    """Raises `BatchSizeMismatch` when the batch shows that its capacity is not `batch_size`."""
    check_told_size(batch_size, (batch.model_extra or {}).get("batch_size"))
    count = batch.sample_count or 0
    if count > batch_size or (batch.status is BatchStatus.filled and count < batch_size):
        raise BatchSizeMismatch(
            f"batch_size is {batch_size} here but batch {batch.index} on the server is {batch.status} "
            f"with {count} samples; use the batch_size of the job"
        )


def check_full(api_client: TokenFactory, job_id: str, batch_size: int, batch: Batch) -> None:
    """Raises `BatchSizeMismatch` when a batch that should be full takes more: the server's `batch_size`, which it does not tell, is larger.

    Such a batch would never be trained. The job is asked too, lest the answer was made just before the batch was filled.
    """
    is_told = "status" in batch.model_fields_set and batch.status is BatchStatus.filling
    if not is_told or batch.sample_count != batch_size:
        return
    if api_client.v1alpha1.fine_tuning.jobs.get_runtime_status(job_id=job_id).filled_batches <= batch.index:
        raise BatchSizeMismatch(
            f"batch_size is {batch_size} here but batch {batch.index} on the server takes more than {batch_size} samples; "
            "use the batch_size of the job"
        )


def within_bytes(samples: Iterable[StampedSample], max_bytes: int) -> list[StampedSample]:
    """The first ones, up to `max_bytes` together, but at least one."""
    chunk: list[StampedSample] = []
    size = 0
    for sample in samples:
        size += len(sample.body)
        if chunk and size > max_bytes:
            break
        chunk.append(sample)
    return chunk
