"""Runs a user's rollout function against a job and uploads what it returns."""

from upweight.rollout.config import ExecutorType, RolloutConfig
from upweight.rollout.context import RolloutContext
from upweight.rollout.dataset import CyclingDataset, DatasetProtocol
from upweight.rollout.exceptions import (
    BatchSizeMismatch,
    DatasetExhausted,
    JobInitializationTimeout,
    JobUnavailable,
    RolloutStalled,
    RolloutTimeout,
    RolloutValidationError,
    UploadFailed,
    WorkerPoolBroken,
)
from upweight.rollout.runner import RolloutRunner
from upweight.rollout.summary import RunProgress, RunSummary

__all__ = [
    "BatchSizeMismatch",
    "CyclingDataset",
    "DatasetExhausted",
    "DatasetProtocol",
    "ExecutorType",
    "JobInitializationTimeout",
    "JobUnavailable",
    "RolloutConfig",
    "RolloutContext",
    "RolloutRunner",
    "RolloutStalled",
    "RolloutTimeout",
    "RolloutValidationError",
    "RunProgress",
    "RunSummary",
    "UploadFailed",
    "WorkerPoolBroken",
]
