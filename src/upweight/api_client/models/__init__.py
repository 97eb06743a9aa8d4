"""Wire models; the names of the RL job API are here too, as in older clients."""

from upweight.api_client.models.rl_job import (
    Batch,
    BatchStatus,
    CreateBatchRequest,
    HTTPValidationError,
    JobStatus,
    Sample,
    UploadSamplesRequest,
    ValidationError,
)

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
