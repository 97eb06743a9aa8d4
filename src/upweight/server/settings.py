"""What a server can be told. Environment: `UPWEIGHT_<NAME>`; arguments beat it; an empty variable counts as unset."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from upweight.errors import ConfigError
from upweight.server.log_lines import LogFormat


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="UPWEIGHT_", env_ignore_empty=True, frozen=True, extra="forbid")

    home: Path = Field(default=Path("~/.upweight"), description="folder of store, jobs, logs and key")
    host: str = Field(default="127.0.0.1", description="address to listen on; loopback unless asked otherwise")
    port: int = Field(default=8000, ge=0, le=65535, description="0 = any free port")
    store: str | None = Field(
        default=None,
        repr=False,  # it may hold a password
        description="URL of a PostgreSQL database, postgresql://USER:PASSWORD@HOST/NAME; None = a SQLite file in the home folder",
    )
    log_format: LogFormat = Field(default="text", description="lines of logs/server.log: text, or json for a collector")
    parent_pipe: bool = Field(default=False, description="stop when standard input reaches its end")

    max_running: int = Field(
        default=1,
        ge=1,
        description="jobs with a worker process at the same time, if their memory suffices; others queue",
    )
    memory_gb: float | None = Field(
        default=None,
        gt=0,
        description="what jobs that run together may need, by estimate, in GB; None = as much as the machine has free",
    )
    idle_memory_gb: float | None = Field(
        default=None,
        ge=0,
        description="a worker of a finished job that holds more memory (GB) is stopped; None = no limit",
    )
    disk_budget_gb: float = Field(
        default=50.0, gt=0, description="what the home folder may grow to, in GB (10^9 bytes)"
    )
    max_body_mb: int = Field(default=256, ge=1, description="largest request body; larger ones are answered 413")
    max_requests_per_second: float | None = Field(
        default=None, gt=0, description="requests of a project beyond this rate are answered 429; None = no limit"
    )
    max_file_mb: int = Field(
        default=512, ge=1, le=2000, description="largest uploaded file; larger ones are answered 413"
    )
    local_tracking: bool = Field(
        default=False, description="MLflow of a job may be a file or database on this machine, not only a server"
    )
    tracker_timeout: float = Field(
        default=60.0,
        gt=0,
        description="seconds for an answer of a tracker, and for all that is left when its job is over",
    )

    worker_command: tuple[str, ...] = Field(
        default=(sys.executable, "-m", "upweight.server.worker"), description="command; the spec's path is appended"
    )
    max_restarts: int = Field(
        default=3, ge=0, description="worker deaths in a row without a new version before failure"
    )
    max_skipped_updates: int = Field(default=3, ge=1, description="skipped updates in a row that fail a job")
    restart_backoff: float = Field(default=1.0, ge=0, description="seconds before the first restart; doubles each time")
    worker_start_timeout: float = Field(default=900.0, gt=0, description="seconds until a worker must be ready")
    worker_silence_timeout: float = Field(default=600.0, gt=0, description="seconds without an answer before a kill")
    worker_warm_up: int = Field(
        default=0,
        ge=0,
        description="a worker compiles at its start what requests of up to this many tokens, prompt and answer, need; 0 = as they come",
    )
    worker_poll_interval: float = Field(default=1.0, gt=0, description="seconds between looks at a worker's state")
    worker_stop_timeout: float = Field(default=3.0, ge=0, description="seconds between SIGTERM and SIGKILL")
    inference_wait: float = Field(default=600.0, ge=0, description="seconds a request waits for a worker to be ready")
    inference_timeout: float = Field(default=900.0, gt=0, description="seconds a request may take in the worker")

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()


def load_settings(**overrides: Any) -> Settings:
    """Settings from arguments and environment. Raises ConfigError: one line naming field and value."""
    try:
        return Settings(**overrides)
    except SettingsError as error:
        raise ConfigError(f"the environment of the server: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"setting {field} = {problem.get('input')!r}: {problem['msg']}") from error
