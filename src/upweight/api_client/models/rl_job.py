"""Wire models of the RL job API."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

from pydantic import Field

from upweight.api_client.models._base import HTTPValidationError, ValidationError, WireModel

__all__ = [
    "Batch",
    "BatchStatus",
    "CreateBatchRequest",
    "HTTPValidationError",
    "JobStatus",
    "Sample",
    "UploadSamplesRequest",
    "ValidationError",
]


class CreateBatchRequest(WireModel):
    index: int = Field(ge=0)


class JobStatus(WireModel):
    """`inference_version` is null until the job serves; `total_batches` is null for a job without end."""

    object: str = "fine_tuning.job.status"
    inference_version: int | None
    total_batches: int | None
    filled_batches: int = Field(ge=0)


class BatchStatus(Enum):
    filling = "filling"
    filled = "filled"


class Batch(WireModel):
    object: str = "fine_tuning.batch"
    index: int = Field(ge=0)
    status: Annotated[BatchStatus | str | None, Field(union_mode="left_to_right")] = BatchStatus.filling
    sample_count: int | None = Field(default=0, ge=0)


class Sample(WireModel):
    """One row of training data: `token_ids`, `logprobs` and `mask` have one length."""

    object: str = "fine_tuning.rl_sample"
    id: str
    token_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    normalized_reward: float
    metadata: dict[str, str]
    debug_info: dict[str, Any]


class UploadSamplesRequest(WireModel):
    samples: list[Sample]
