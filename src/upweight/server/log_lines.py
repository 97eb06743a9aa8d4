"""Lines of the server's log: text for people, or one JSON object each for a collector (`UPWEIGHT_LOG_FORMAT=json`)."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

MEGABYTE = 1_000_000
SILENCE = 60.0  # seconds between two complaints about a log that cannot be written

LogFormat = Literal["text", "json"]


class JSONLines(logging.Formatter):
    """time (UTC, ISO 8601), level, logger, message; then `facts` of the record, such as its job, and a traceback if there is one.

    >>> log.info("job %s: paused", job_id, extra={"facts": {"job": job_id}})
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def formatter(log_format: LogFormat) -> logging.Formatter:
    if log_format == "json":
        return JSONLines()
    return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


class LogFile(RotatingFileHandler):
    """A log that may lie on a full disk: what it cannot hold is lost, which standard error is told in a line now and then."""

    def __init__(self, path: Path, log_format: LogFormat) -> None:
        super().__init__(path, maxBytes=10 * MEGABYTE, backupCount=3)
        self.setFormatter(formatter(log_format))
        self._told_at: float | None = None

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        now = time.monotonic()
        if self._told_at is None or now - self._told_at > SILENCE:
            self._told_at = now
            print(
                f"upweight server: {self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr, flush=True
            )
