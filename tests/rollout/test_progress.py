"""A run shows itself as asked, and never more."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from upweight.rollout import RolloutRunner
from upweight.rollout.progress import _LiveView, in_words, numbers, reporting
from upweight.rollout.summary import GroupCounts, RunProgress
from upweight.rollout.waits import rollouts_in_words

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
        "1/4 batches filled after 0:00:01, 3 samples in the next; version 1; 6 of 9 groups accepted, 2 rejected, 1 failed; "
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


def test_the_last_snapshot_is_told_even_if_it_came_early() -> None:
    out = io.StringIO()
    with reporting("plain", "job-1", out) as show:
        show(snapshot(1))
        show(snapshot(1, counts=GroupCounts(started=9, accepted=8, rejected=1)))
    assert out.getvalue().splitlines()[1:] == [
        "job-1: 1/4 batches filled after 0:00:01, 3 samples in the next; version 1; 8 of 9 groups accepted, 1 rejected; "
        "2 in flight"
    ]


SCRIPT = """
import sys
from upweight.api_client import TokenFactory
from upweight.rollout import RolloutRunner
from tests.rollout import helpers
with TokenFactory(sys.argv[1], "k") as api:
    print(RolloutRunner(api, helpers.config(), helpers.rollout, helpers.Counting()).run().reason)
"""
ROOT = Path(__file__).parents[2]


def test_a_plain_script_off_a_terminal_prints_plain_lines(server: Any) -> None:
    """Without any set-up of logging."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.url], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout == "all batches are filled\n"
    lines = done.stderr.splitlines()
    assert all(
        re.match(r"job-1: [0-3]/3 batches filled after 0:00:0\d, \d samples in the next; ", line) for line in lines
    )
    assert lines[-1].startswith("job-1: 3/3 batches filled")
    assert lines[-1].endswith("0 in flight")  # and waits for nothing
    assert 1 < len(lines) < 6


def test_where_nothing_can_be_shown_the_run_goes_on(server: Any) -> None:
    """Standard error may be closed, or a pipe that nobody reads any more."""
    closed = f'"{sys.executable}" -c "$0" {server.url} 2>&-'
    done = subprocess.run(["sh", "-c", closed, SCRIPT], stdout=subprocess.PIPE, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "all batches are filled\n"


class Closing(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


def test_a_broken_pipe_is_told_once(caplog: Any) -> None:
    with reporting("plain", "job-1", Closing()) as show:
        for filled in range(3):
            show(snapshot(filled))
    assert [r.getMessage() for r in caplog.records] == ["No more progress is shown: nobody reads"]


def test_log_records_carry_the_numbers(api: Any, caplog: Any, capfd: Any) -> None:
    with caplog.at_level(logging.INFO, logger="upweight.rollout.progress"):
        RolloutRunner(api, helpers.config(), helpers.rollout, helpers.Counting(), progress="log").run()
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


@pytest.mark.parametrize(
    ("n_running", "oldest", "words"),
    [
        (1, {"task-a": 43.4}, "43 s for group 9: rollout function still running (task-a)"),
        (
            3,
            {"task-a": 43.4, "task-b": 12.0},
            "43 s for group 9: rollout function still running (task-a), 12 s for group 11 (task-b), and 1 more",
        ),
        (1, {"task-x": 2.0}, "2 s for task-x: rollout function still running"),
        (2, {}, "2 rollouts"),
    ],
)
def test_the_wait_for_rollouts_tells_age_and_number(n_running: int, oldest: dict[str, float], words: str) -> None:
    """Failure H14."""
    assert rollouts_in_words(n_running, oldest, {"task-a": 9, "task-b": 11}) == words


# -- the live line

WAIT = "43 s for group 9: rollout function still running (task-0123456789abcdef0123456789abcdef)"
FEW = GroupCounts(started=9, accepted=6, rejected=1, failed=2)
MANY = GroupCounts(started=912, accepted=640, rejected=213, failed=11, timed_out=3, dropped_stale=45)


def rendered(width: int, counts: GroupCounts, **kw: Any) -> list[str]:
    view = _LiveView("job-0123456789abcdef0123456789abcdef")
    view.show(snapshot(0, seconds=0.0))
    view.show(snapshot(2, counts=counts, seconds=83.4, waiting_for=WAIT, in_flight=32, num_batches=10, **kw))
    view._latest = float("inf"), view._latest[1]  # the clock stands
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("width", "few", "many"),
    [
        (
            40,
            "2/10 batches  0:01:23  3 lost  version 2",
            "2/10 batches  0:01:23  272 lost  v2",
        ),
        (
            60,
            "2/10 batches  0:01:23  0:05:33 left  1 rejected, 2 failed",
            "2/10 batches  0:01:23  0:05:33 left  272 lost  version 2",
        ),
        (
            80,
            "2/10 batches  0:01:23  0:05:33 left  1 rejected, 2 failed  6/9 groups  version 2",
            "2/10 batches  0:01:23  213 rejected, 11 failed, 3 timed out, 45 dropped as stale",
        ),
        (
            120,
            "━━──────────  2/10 batches  +3 samples  0:01:23  0:05:33 left  1 rejected, 2 failed  6/9 groups  version 2  "
            "32 in flight",
            "2/10 batches  0:01:23  0:05:33 left  213 rejected, 11 failed, 3 timed out, 45 dropped as stale  "
            "640/912 groups  v2",
        ),
    ],
)
def test_the_live_line_fits_with_times_and_losses(width: int, few: str, many: str) -> None:
    """What matters least is left out first; the second line tells the wait."""
    wait = f"waiting for {WAIT}"
    wait = wait if len(wait) <= width else f"{wait[: width - 1]}…"
    assert rendered(width, FEW) == [few, wait]
    assert rendered(width, MANY) == [many, wait]


@pytest.mark.parametrize("width", range(5, 130, 4))
def test_no_live_line_is_too_wide(width: int) -> None:
    for counts in (FEW, MANY, GroupCounts()):
        lines = rendered(width, counts)
        assert len(lines) == 2
        assert max(map(len, lines)) <= width


def test_the_end_of_a_live_line_waits_for_nothing() -> None:
    view = _LiveView("job-1")
    console = Console(file=io.StringIO(), width=80)
    console.print(view)
    view.show(snapshot(4))
    view.stop()
    console.print(view)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "0:00:00  waiting for the job job-1",
        "job-1  4/4 batches  0:00:01  2 rejected, 1 failed  6/9 groups  v4  2 in flight",
    ]


def test_a_terminal_gets_a_live_line(server: Any) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, server.url],
        stderr=theirs,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
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
    assert b"\x1b[" in shown
    lines = re.sub(r"\x1b\[[\d;?]*\w", "", shown.decode()).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.strip()][-1].split("  ")[:2] == ["━" * 12, "3/3 batches"]


def test_nothing_is_loaded_or_logged_at_import() -> None:
    code = "import sys, upweight.rollout; assert not {'openai', 'jax', 'numpy', 'datasets', 'ray'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
