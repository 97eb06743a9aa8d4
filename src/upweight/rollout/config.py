"""Settings of a rollout run.

Invariant: every time in seconds is finite and so small that the system can wait for it; None is how to say "for ever".
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

HOUR_S, DAY_S, YEAR_S = 3600, 86_400, 31_536_000


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


def _from_0_to(limit: int, *, but_0: bool = False, or_none: bool = False) -> BeforeValidator:
    """A check of seconds whose message tells field, value and range; pydantic's own ones let NaN pass or tell no range."""

    def check(value: Any, info: ValidationInfo) -> Any:
        try:
            seconds = float(value)
        except (TypeError, ValueError, OverflowError):
            return value  # None, or something for the check of the type
        if 0 <= seconds <= limit and not (but_0 and seconds == 0):
            return value
        least, none = ("above 0 and up" if but_0 else "from 0"), ("; None means no limit" if or_none else "")
        raise ValueError(f"{info.field_name} is {value}; it must be {least} to {limit} seconds{none}")

    return BeforeValidator(check)


def _in_the_way(folder: Path) -> Path | None:
    """What makes it impossible that `folder` is one, or becomes one."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), None)
    return None if there is None or there.is_dir() else there


def _check_folder(path: Path | None, info: ValidationInfo) -> Path | None:
    if path is not None and (file := _in_the_way(path)):
        raise ValueError(f"{info.field_name} is {path}, but {file} is a file; name a folder, which is made if need be")
    return path


def _check_file(path: Path | None, info: ValidationInfo) -> Path | None:
    if path is not None and path.is_dir():
        raise ValueError(f"{info.field_name} is {path}, which is a folder; name a file in it")
    if path is not None and (file := _in_the_way(path.parent)):
        raise ValueError(f"{info.field_name} is {path}, but {file} is a file; name a file in a folder")
    return path


class RolloutConfig(BaseSettings):
    """Arguments win over `TOKENFACTORY_ROLLOUT_…` variables. Mutable; relations are checked by `RolloutRunner(...)`."""

    model_config = SettingsConfigDict(env_prefix="TOKENFACTORY_ROLLOUT_", extra="forbid", protected_namespaces=())

    job_id: str = Field(min_length=1, description="the job to feed")
    model_name: str = Field(min_length=1, description="model name to put into inference requests")
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
    status_polling_interval: Annotated[float, _from_0_to(HOUR_S)] = Field(
        default=1.0, description="seconds; polls are ≥ 10 ms apart"
    )
    job_init_timeout: Annotated[Optional[int], _from_0_to(YEAR_S, or_none=True)] = Field(
        default=600, description="seconds until the job must serve; None = for ever, 0 = one try"
    )
    requeue_lost_tasks: int = Field(
        default=0,
        ge=0,
        description="times a task that failed or was dropped as stale is put back",
    )
    rollout_timeout: Annotated[Optional[float], _from_0_to(YEAR_S, but_0=True, or_none=True)] = Field(
        default=None, description="seconds per attempt"
    )
    rollout_retry_backoff: Annotated[float, _from_0_to(HOUR_S)] = Field(
        default=0.05, description="seconds before the first retry; doubles, up to 5 s"
    )
    status_failure_timeout: Annotated[Optional[float], _from_0_to(YEAR_S, or_none=True)] = Field(
        default=600, description="seconds without one successful status poll until `JobUnavailable`"
    )
    no_progress_timeout: Annotated[Optional[float], _from_0_to(YEAR_S, but_0=True, or_none=True)] = Field(
        default=None, description="seconds without an accepted sample until `RolloutStalled`"
    )
    max_pool_restarts: int = Field(default=3, ge=0, description="deaths of process workers in a row")
    process_start_method: Literal["spawn", "forkserver", "fork"] = "spawn"
    shutdown_timeout: Annotated[float, _from_0_to(DAY_S)] = Field(
        default=5.0, description="seconds for threads, workers and last uploads"
    )
    upload_timeout: Annotated[float, _from_0_to(YEAR_S)] = Field(
        default=600, description="seconds of failing uploads until `UploadFailed`"
    )
    spool_dir: Annotated[Optional[Path], AfterValidator(_check_folder)] = Field(
        default=None, description="folder that keeps unsent samples for the next run"
    )
    group_log: Annotated[Optional[Path], AfterValidator(_check_file)] = Field(
        default=None, description="file that gets one JSON line per finished group"
    )


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
    """Check ranges and relations again, since a config may have been changed; what was set as text gets its type.

    Raises:
        pydantic.ValidationError: naming the fields.
    """
    checked = _CheckedConfig(**config.model_dump(warnings=False))
    for name in RolloutConfig.model_fields:
        given, typed = getattr(config, name), getattr(checked, name)
        if type(given) is not type(typed):
            setattr(config, name, typed)
