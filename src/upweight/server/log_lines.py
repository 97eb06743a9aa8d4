"""Lines of the server's log: text for people, or one JSON object each for a collector (`UPWEIGHT_LOG_FORMAT=json`)."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

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
