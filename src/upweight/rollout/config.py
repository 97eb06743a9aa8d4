"""Settings of a rollout run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class ExecutorType(StrEnum):
    """Where rollout functions run; `RAY` needs the extra `upweight[ray]`."""

    THREAD = "thread"
    PROCESS = "process"
    RAY = "ray"


def _none_from_text(value: object) -> object:
    """An empty or `none` environment variable means None."""
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


T = TypeVar("T")
Optional = Annotated[T | None, BeforeValidator(_none_from_text)]


class RolloutConfig(BaseSettings):
    """Arguments win over `TOKENFACTORY_ROLLOUT_…` variables. Mutable; relations are checked by `RolloutRunner(...)`."""

    model_config = SettingsConfigDict(env_prefix="TOKENFACTORY_ROLLOUT_", extra="forbid", protected_namespaces=())

    job_id: str = Field(description="the job to feed")
    model_name: str = Field(description="model name to put into inference requests")
    batch_size: int = Field(ge=1, description="samples per training batch; a multiple of num_samples_per_task")
    num_samples_per_task: int = Field(ge=1, description="samples of one task, the group")
    num_batches: Optional[Annotated[int, Field(ge=0)]] = Field(default=None, description="None = without end")
    max_concurrency: int = Field(default=32, ge=1, description="samples in flight")
    executor_type: ExecutorType = ExecutorType.THREAD
    allowed_staleness: Optional[Annotated[int, Field(ge=-1)]] = Field(
        default=0, description="bound on `batch − 1 − version`; −1 = strictly on-policy, None = no check"
    )
    drop_stale_trajectories: bool = Field(default=False, description="drop stale groups instead of buffering")
    num_rollout_retries: int = Field(default=0, ge=0)
    raise_on_rollout_failure: bool = Field(default=False, description="end the run instead of rejecting the task")
    status_polling_interval: float = Field(default=1.0, ge=0, description="seconds; polls are ≥ 10 ms apart")
    job_init_timeout: Optional[Annotated[int, Field(ge=0)]] = Field(
        default=600, description="seconds until the job must serve; None = for ever, 0 = one try"
    )
    requeue_lost_tasks: int = Field(
        default=0,
        ge=0,
        description="times a task that failed or was dropped as stale is put back",
    )
    rollout_timeout: Optional[Annotated[float, Field(gt=0)]] = Field(default=None, description="seconds per attempt")
    rollout_retry_backoff: float = Field(default=0.05, ge=0, description="seconds before the first retry; doubles")
    status_failure_timeout: Optional[Annotated[float, Field(ge=0)]] = Field(
        default=600, description="seconds without one successful status poll until `JobUnavailable`"
    )
    no_progress_timeout: Optional[Annotated[float, Field(gt=0)]] = Field(
        default=None, description="seconds without an accepted sample until `RolloutStalled`"
    )
    max_pool_restarts: int = Field(default=3, ge=0, description="deaths of process workers in a row")
    process_start_method: Literal["spawn", "forkserver", "fork"] = "spawn"
    shutdown_timeout: float = Field(default=5.0, ge=0, description="seconds for threads, workers and last uploads")
    upload_timeout: float = Field(default=600, ge=0, description="seconds of failing uploads until `UploadFailed`")
    spool_dir: Optional[Path] = Field(default=None, description="keep unsent samples here for the next run")
    group_log: Optional[Path] = Field(default=None, description="file that gets one JSON line per finished group")


class _CheckedConfig(RolloutConfig):
    model_config = SettingsConfigDict(extra="allow")

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        group, batch, places = self.num_samples_per_task, self.batch_size, self.max_concurrency
        if batch % group:
            raise ValueError(f"batch_size {batch} must be divisible by num_samples_per_task {group}")
        if places < group:
            raise ValueError(
                f"max_concurrency {places} is less than num_samples_per_task {group}: no task could ever start"
            )
        return self


def check_config(config: RolloutConfig) -> None:
    """Check ranges and relations again, since a config may have been changed.

    Raises:
        pydantic.ValidationError: naming the fields.
    """
    _CheckedConfig(**config.model_dump())
