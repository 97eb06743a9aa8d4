"""The runs of W&B and MLflow that a job's metrics go to: begun once, gone on with by every later process, no row told twice.

Imports of the trackers take seconds, so they happen when a run is opened.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from upweight.server.home import write_atomically
from upweight.server.integrations import CERTIFICATE
from upweight.server.tracker.protocol import Begin, Position, Row
from upweight.training.callbacks.trackers import (
    MlflowLoggerCallback,
    MlflowLoggerConfig,
    WandbLoggerCallback,
    WandbLoggerConfig,
    tracker_module,
)

JOB_TAG = "upweight.job"
LOGINS = ("MLFLOW_TRACKING_", "DATABRICKS_", "NETRC")
LONGEST_PARAM = 500  # characters
DEFAULT_EXPERIMENT = "upweight"
STEP = "version"  # the axis of the charts
RUN_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class Sink(Protocol):
    note: str

    def send(self, row: Row, at: Position) -> None:
        """Hand a row over; `at` is the position before it."""

    def finish(self, status: str | None) -> None:
        """Everything is written; `status` is that of the job, None when it goes on later."""


def open_sink(begin: Begin) -> Sink:
    os.environ.update(ENVIRONMENT)
    return (WandbSink if begin["kind"] == "wandb" else MlflowSink)(begin)


# Nothing is told about this machine or process, and no call takes for ever.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_INIT_TIMEOUT": "30",
    "WANDB_SILENT": "true",
    "WANDB_X_DISABLE_META": "true",
    "WANDB_X_DISABLE_STATS": "true",
    "WANDB_X_DISABLE_MACHINE_INFO": "true",
    "WANDB_X_SAVE_REQUIREMENTS": "false",
}


class WandbSink:
    def __init__(self, begin: Begin) -> None:
        given: dict[str, Any] = begin["shown"]
        if key := begin["secret"].get("api_key"):
            os.environ["WANDB_API_KEY"] = key
        config = WandbLoggerConfig(
            project=given["project"],
            entity=given["entity"],
            name=given["name"] or begin["job_id"],
            tags=given["tags"] or [],
            config=begin["settings"],
            mode=os.environ.get("WANDB_MODE") or "online",
            run_id=begin["job_id"],
            resume="allow",
            log_dir=begin["folder"],
        )
        self._callback = WandbLoggerCallback(config)
        self._callback.on_train_begin(None)
        self._run = self._callback.run
        self._run.define_metric("*", step_metric=STEP)
        self.note = f"run {begin['job_id']} of project {given['project']}"

    def send(self, row: Row, at: Position) -> None:
        # Rows are numbered as they come: a step that the run has already is dropped by W&B itself.
        number = at["version"] + at["client"]
        self._callback.write({**row["metrics"], STEP: float(row["step"])}, number)

    def finish(self, status: str | None) -> None:
        self._run.finish(exit_code=int(status == "failed"))


class MlflowSink:
    def __init__(self, begin: Begin) -> None:
        given, secret = begin["shown"], begin["secret"]
        _forget_logins(begin["folder"])
        for name in ("username", "password"):
            if name in secret:
                os.environ[f"MLFLOW_TRACKING_{name.upper()}"] = secret[name]
        if pem := secret.get("certificate_file"):
            os.environ["MLFLOW_TRACKING_SERVER_CERT_PATH"] = str(_private_file(Path(begin["folder"]), pem))
        uri, experiment = str(given["tracking_uri"]), str(given["experiment_name"] or DEFAULT_EXPERIMENT)
        self._client = tracker_module("mlflow", "mlflow").MlflowClient(uri)
        tags: dict[str, str] = dict(given["tags"] or {})  # type: ignore[call-overload]
        config = MlflowLoggerConfig(
            experiment,
            tracking_uri=uri,
            name=str(given["run_name"] or begin["job_id"]),
            tags={**tags, JOB_TAG: begin["job_id"]},
            run_id=(known := self._run_of(experiment, begin["job_id"])),
        )
        self._callback = MlflowLoggerCallback(config)
        self._callback.on_train_begin(None)
        self._run_id = self._callback.run.info.run_id
        if known is None:
            make = tracker_module("mlflow.entities", "mlflow").Param
            params = [make(name, str(value)[:LONGEST_PARAM]) for name, value in begin["settings"].items()]
            self._client.log_batch(self._run_id, params=params)
        # A process that was killed may have sent more than it could note.
        self._sent = {int(point.value) for point in self._client.get_metric_history(self._run_id, STEP)}
        self.note = f"run {self._run_id} of experiment {experiment} at {uri}"

    def send(self, row: Row, at: Position) -> None:
        if row["version"] is None:
            self._callback.write(row["metrics"], row["step"])
        elif row["version"] not in self._sent:
            self._callback.write(
                {**row["metrics"], STEP: float(row["version"])}, row["step"]
            )  # STEP last: all is there

    def finish(self, status: str | None) -> None:
        if status is not None:
            self._client.set_terminated(self._run_id, status=RUN_STATUS[status])

    def _run_of(self, experiment: str, job_id: str) -> str | None:
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            return None
        runs = self._client.search_runs([found.experiment_id], f"tags.`{JOB_TAG}` = '{job_id}'", max_results=1)
        return runs[0].info.run_id if runs else None


def _forget_logins(folder: str) -> None:
    """Those of whoever runs the server are not for a host that a job's owner names."""
    for name in [name for name in os.environ if name.startswith(LOGINS)]:
        del os.environ[name]
    os.environ["HOME"] = folder  # where MLflow and requests look for logins in files


def _private_file(folder: Path, text: str) -> Path:
    path = folder / CERTIFICATE
    write_atomically(path, text, mode=0o600)
    return path
