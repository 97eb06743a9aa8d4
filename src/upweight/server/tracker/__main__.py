"""`python -m upweight.server.tracker`: one job's metrics to one tracker, as told on standard input. See `protocol`.

Invariants:
* What was handed over is noted in the job's folder before it is answered, so a process that follows goes on behind it.
* One process at a time has a job's run: the next one waits for the lock of the former.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from upweight.errors import ConfigError
from upweight.server.home import write_atomically
from upweight.server.integrations import Integration, without_secrets
from upweight.server.tracker.protocol import END_SECONDS, START, Begin, Position, at_after
from upweight.server.tracker.sinks import Sink, open_sink

LONGEST_REASON = 300


def main() -> None:
    os.nice(10)  # training comes first
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a tracker prints goes to the log
    begin: Begin = json.loads(sys.stdin.readline())
    try:
        _follow(begin, answers)
    except Exception as error:  # noqa: BLE001 - told to the parent in one line, without secrets
        _say(answers, {"failed": _reason(error, begin), "fatal": isinstance(error, ConfigError)})
    os._exit(0)  # threads of a tracker that does not answer are not waited for


def _follow(begin: Begin, answers: IO[str]) -> None:
    place = Path(begin["folder"]) / f"tracked-{begin['kind']}.json"
    lock = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _take(lock)
    at = _position(place)
    sink = open_sink(begin)
    _say(answers, {"at": at, "note": sink.note})
    status = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "end" in asked:
            status = asked["end"]
            break
        at = _send(sink, asked["rows"], at, place)
        _say(answers, {"at": at})
    threading.Timer(END_SECONDS, os._exit, (1,)).start()  # also when nobody is left to end this process
    sink.finish(status)
    with contextlib.suppress(BrokenPipeError):
        _say(answers, {"done": True})


def _send(sink: Sink, rows: list[Any], at: Position, place: Path) -> Position:
    for row in rows:
        sink.send(row, at)
        at = at_after(at, row)
        write_atomically(place, json.dumps(at))
    return at


def _position(place: Path) -> Position:
    try:
        noted: Position = json.loads(place.read_text())
        return noted
    except FileNotFoundError:
        return START


def _take(lock: int) -> None:
    end = time.monotonic() + END_SECONDS + 5
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _say(answers: IO[str], content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def _reason(error: Exception, begin: Begin) -> str:
    """One line. The scrubbing comes before the cut: half a secret is one too."""
    integration = Integration(kind=begin["kind"], shown={}, secret=begin["secret"])
    # What a host answered is not shown: its name comes from the job's owner, and it may be one that only the server reaches.
    said = str(error).partition("Response body")[0].strip() or type(error).__name__
    text = without_secrets(said, integration)
    return text.splitlines()[0][:LONGEST_REASON]


if __name__ == "__main__":
    main()
