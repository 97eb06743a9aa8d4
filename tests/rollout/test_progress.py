"""A run shows itself as asked, and never more."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
from typing import Any

import pytest

from upweight.rollout import RolloutRunner
from upweight.rollout.progress import in_words, numbers, reporting
from upweight.rollout.summary import GroupCounts, RunProgress

from . import helpers


def snapshot(filled: int, **kw: Any) -> RunProgress:
    base: dict[str, Any] = {
        "counts": GroupCounts(started=9, accepted=6, rejected=2, failed=1),
        "batches_filled": filled,
        "num_batches": 4,
        "samples_in_batch": 3,
        "in_flight": 2,
        "buffered": 0,
        "backlog": 0,
        "inference_version": filled,
        "seconds": 1.23456,
        "waiting_for": "2 rollouts",
    }
    return RunProgress(**{**base, **kw})


def test_one_line_says_it_all() -> None:
    assert in_words(snapshot(1)) == (
        "1/4 batches filled, 3 samples in the next; version 1; 6 of 9 groups accepted, 2 rejected, 1 failed; "
        "2 in flight; waiting for 2 rollouts"
    )
    assert in_words(snapshot(1, num_batches=None, waiting_for=None)).startswith("1 batches filled")
    assert numbers("j", snapshot(1))["seconds"] == 1.235


def test_plain_lines_are_paced_but_every_batch_is_told() -> None:
    out = io.StringIO()
    with reporting("plain", "job-1", out) as show:
        for filled in [0, 0, 0, 1, 1, 2, 2]:
            show(snapshot(filled))
    assert [line[:8] for line in out.getvalue().splitlines()] == ["job-1: 0", "job-1: 1", "job-1: 2"]


def test_elsewhere_than_on_a_terminal_the_default_is_log_records(make_runner: Any, caplog: Any, capfd: Any) -> None:
    with caplog.at_level(logging.INFO, logger="upweight.rollout.progress"):
        make_runner().run()
    records = [r for r in caplog.records if r.name == "upweight.rollout.progress"]
    assert [r.rollout["batches_filled"] for r in records][-1] == 3
    assert records[0].rollout["job_id"] == "job-1"
    assert capfd.readouterr() == ("", "")


def test_silent_when_asked_and_bad_names_are_refused(api: Any, caplog: Any, capfd: Any) -> None:
    with caplog.at_level(logging.INFO, logger="upweight.rollout.progress"):
        RolloutRunner(api, helpers.config(), helpers.rollout, helpers.Counting(), progress="none").run()
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError, match="progress is 'loud'"):
        RolloutRunner(api, helpers.config(), helpers.rollout, helpers.Counting(), progress="loud")  # type: ignore[arg-type]


def test_a_terminal_gets_a_live_line(server: Any) -> None:
    script = (
        "import sys; from upweight.api_client import TokenFactory\n"
        "from upweight.rollout import RolloutRunner\n"
        "from tests.rollout import helpers\n"
        "with TokenFactory(sys.argv[1], 'k') as api:\n"
        "    print(RolloutRunner(api, helpers.config(), helpers.slow_rollout, helpers.Counting()).run().reason)\n"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-c", script, server.url], stderr=theirs, stdout=subprocess.PIPE, text=True, env=environment
    )
    os.close(theirs)
    assert process.communicate(timeout=60)[0].strip() == "all batches are filled"
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # how the end of a terminal reads
        pass
    os.close(ours)
    assert b"batches filled" in shown
    assert b"\x1b[" in shown


def test_nothing_is_loaded_or_logged_at_import() -> None:
    code = "import sys, upweight.rollout; assert not {'openai', 'jax', 'numpy', 'datasets', 'ray'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
