"""What became of each group, and why: counts, reasons, replacement, what was dropped, and the log of groups."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from upweight.rollout import DatasetExhausted, RolloutStalled
from upweight.rollout.datasets import SequenceDataset
from upweight.rollout.group_log import read_groups
from upweight.rollout.group_log.__main__ import main as browse
from upweight.rollout.models import SampleGroup
from upweight.schedulers import create_rollout_scheduler

from . import helpers
from .test_runner import assert_adds_up


class NoSuchSandboxError(Exception):
    pass


def flaky(task: int, context: Any) -> SampleGroup:
    """By the number of the task: fails, returns nonsense, trains nothing, is rejected, or succeeds."""
    match task % 5:
        case 0:
            raise NoSuchSandboxError("gone")
        case 1:
            return SampleGroup(samples=[helpers.good_sample(mask=[0, 0, 0])])
        case 2:
            return SampleGroup(is_rejected=True)
        case _:
            return helpers.rollout(task, context)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_failures_are_counted_by_reason(server: Any, make_runner: Any, executor: str) -> None:
    """Reports E1, E4, E5, E6: each failed attempt has a reason code, whichever executor ran it."""
    summary = make_runner(flaky, executor_type=executor, num_rollout_retries=1, max_concurrency=2).run()
    assert set(summary.errors) == {"NoSuchSandboxError", "no trainable token"}
    assert sum(summary.errors.values()) == 2 * summary.failed
    assert summary.retries == summary.failed
    assert summary.rejected >= 3
    assert_adds_up(summary)


def test_the_last_error_lists_reasons_and_counts(server: Any, make_runner: Any) -> None:
    """Reports E4, M6: a run without one trainable row says so, and why."""

    def untrainable(task: int, context: Any) -> SampleGroup:
        time.sleep(0.01)
        return SampleGroup(samples=[helpers.good_sample(mask=[0, 0, 0])])

    with pytest.raises(RolloutStalled, match=r"errors: \{'no trainable token': \d+\}"):
        make_runner(untrainable, no_progress_timeout=0.4).run()
    with pytest.raises(DatasetExhausted, match=r"\(5 failed, errors: 5 × no trainable token\)"):
        make_runner(untrainable, dataset=helpers.Counting(5)).run()


def test_one_example_that_always_fails_blocks_nothing(server: Any, make_runner: Any) -> None:
    """Reports E1, E2, E3 and failure H1: it is retried, put back, tried again, then dropped; others take its place."""
    calls: Counter[int] = Counter()

    def rollout(task: int, context: Any) -> SampleGroup:
        calls[task] += 1
        if task == 1:
            raise NoSuchSandboxError("always")
        return helpers.rollout(task, context)

    runner = make_runner(
        rollout,
        dataset=SequenceDataset(list(range(13))),
        num_rollout_retries=2,
        requeue_lost_tasks=1,
        rollout_retry_backoff=0,
    )
    summary = runner.run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert calls.pop(1) == 2 * 3  # two starts with three attempts each
    assert set(calls.values()) == {1}
    assert (summary.failed, summary.requeued, summary.errors) == (2, 1, {"NoSuchSandboxError": 6})
    assert_adds_up(summary)


def test_a_failed_task_is_put_back(server: Any, make_runner: Any) -> None:
    """`rollout-sdk.md` 6.2: nothing of a finite dataset is lost to a passing fault."""
    seen: list[int] = []

    def rollout(task: int, context: Any) -> SampleGroup:
        seen.append(task)
        if task in (0, 3) and seen.count(task) == 1:
            raise NoSuchSandboxError("once")
        sample = helpers.good_sample(metadata={"task": str(task)})
        return SampleGroup(samples=[sample])

    dataset = SequenceDataset(list(range(12)))
    summary = make_runner(rollout, dataset=dataset, requeue_lost_tasks=1, max_concurrency=1).run()
    assert sorted(int(s["metadata"]["task"]) for s in server.samples()) == list(range(12))
    assert (summary.started, summary.requeued, summary.batches_filled) == (14, 2, 3)
    assert Counter(seen).most_common(2) == [(0, 2), (3, 2)]


def long_stragglers(started: threading.Barrier | None = None) -> Any:
    def rollout(task: int, context: Any) -> SampleGroup:
        n = 3
        if task % 4 == 0:  # finishes when the batches it was meant for are full
            time.sleep(0.3)
            n = 100
        else:
            time.sleep(0.02)
        sample = helpers.good_sample(token_ids=[1] * n, logprobs=[-0.5] * n, mask=[1] * n)
        return SampleGroup(samples=[sample])

    return rollout


def test_dropped_groups_are_replaced_and_their_age_and_length_reported(
    server: Any, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Report A5 and failure H2: the bias of dropping can be seen, and the run still ends with N full batches."""
    with caplog.at_level(logging.INFO):
        summary = make_runner(
            long_stragglers(), drop_stale_trajectories=True, num_batches=8, max_concurrency=8, allowed_staleness=0
        ).run()
    assert server.sizes() == dict.fromkeys(range(8), 4)
    assert server.worst_staleness() <= 0
    assert summary.dropped_stale > 0
    assert sum(summary.dropped_ages.values()) == sum(summary.dropped_lengths.values()) == summary.dropped_stale
    assert min(summary.dropped_ages) >= 1
    assert set(summary.dropped_lengths) <= {4, 128}
    assert summary.dropped_lengths[128] > 0
    assert "A group was dropped: staleness" in caplog.text
    assert_adds_up(summary)


def test_pacing_instead_of_dropping_loses_nothing(server: Any, make_runner: Any) -> None:
    """Report A5: the default policy waits for long answers instead."""
    summary = make_runner(long_stragglers(), num_batches=6, max_concurrency=8, allowed_staleness=0).run()
    assert summary.dropped_stale == 0
    assert sum(len(s["token_ids"]) == 100 for s in server.samples()) >= 4
    assert server.worst_staleness() <= 0


class RecordingScheduler:
    """Notes all that a run tells its scheduler, in order."""

    def __init__(self, scheduler: Any, log: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._scheduler, self._log = scheduler, log

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._scheduler, name)
        if not callable(value) or name == "get_num_rollouts_to_spawn":
            return value

        def told(*args: Any) -> Any:
            self._log.append((name, tuple(list(a) if name == "add_tasks" else a for a in args)))
            return value(*args)

        return told


@pytest.mark.parametrize("drop", [False, True])
def test_replaying_the_log_of_a_run_gives_the_same_decisions(
    server: Any, make_runner: Any, monkeypatch: pytest.MonkeyPatch, drop: bool
) -> None:
    """Report A3: what is accepted and what is dropped depends on the order of events alone."""
    from upweight.rollout import run as module

    log: list[tuple[str, tuple[Any, ...]]] = []
    made: list[Any] = []
    make = module.make_scheduler

    def recording(*args: Any) -> Any:
        made.append(make(*args))
        return RecordingScheduler(made[0], log)

    monkeypatch.setattr(module, "make_scheduler", recording)
    make_runner(long_stragglers(), drop_stale_trajectories=drop, num_batches=5, max_concurrency=8).run()
    assert (made[0].dropped_groups > 0) is drop
    again = create_rollout_scheduler(made[0].config)
    again.set_initial_batch_index(0, 0)
    again.set_inference_version(0)
    ready: list[str] = []
    dropped: list[str] = []
    for name, args in log:
        result = getattr(again, name)(*args)
        if name == "get_ready_samples":
            ready += [sample.id for sample in result]
        elif name == "get_dropped_groups":
            dropped += [sample.id for group in result for sample in group.samples]
    assert ready[: len(server.samples())] == [sample["id"] for sample in server.samples()]
    assert not set(dropped) & {sample["id"] for sample in server.samples()}
    assert (again.accepted_groups, again.dropped_groups) == (made[0].accepted_groups, made[0].dropped_groups)


@dataclasses.dataclass
class Question:
    text: str
    extra: Any = None


def test_groups_are_logged_and_can_be_browsed(
    server: Any, make_runner: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Report D9: whole trajectories, also of what failed, one line each."""
    file = tmp_path / "logs" / "groups.jsonl"

    def rollout(task: Question, context: Any) -> SampleGroup:
        if task.text == "q1":
            raise NoSuchSandboxError("gone")
        if task.text == "q2":
            return SampleGroup(is_rejected=True)
        return SampleGroup(samples=[helpers.good_sample(debug_info={"reward": 0.25})])

    tasks = [Question(f"q{i}", extra=threading.Lock() if i == 3 else None) for i in range(14)]
    make_runner(rollout, dataset=SequenceDataset(tasks), group_log=file).run()
    groups = list(read_groups(file))
    assert Counter(g["fate"] for g in groups) == {"accepted": 12, "rejected": 1, "failed": 1}
    failed = next(g for g in groups if g["fate"] == "failed")
    assert (failed["task"]["text"], failed["reasons"]) == ("q1", ["NoSuchSandboxError"])
    assert failed["error"] == "NoSuchSandboxError: gone"
    accepted = {g["samples"][0]["id"]: g for g in groups if g["samples"]}
    assert set(accepted) == {sample["id"] for sample in server.samples()}
    assert next(iter(accepted.values()))["samples"][0]["logprobs"] == [0.0, -0.1, -0.2]
    with file.open("ab") as half:
        half.write(b'{"cut')
    browse([str(file), "--fate", "failed"])
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert "failed: NoSuchSandboxError: gone" in line
    browse([str(file)])
    assert "rewards [0.25], tokens [3]" in capsys.readouterr().out
    browse([str(file), "--task", failed["task_id"]])
    assert json.loads(capsys.readouterr().out) == failed


def test_the_log_is_browsed_from_the_command_line(make_runner: Any, tmp_path: Path) -> None:
    """Without a warning of Python about a module imported twice; what cannot be read is told in one line."""
    file = tmp_path / "groups.jsonl"
    make_runner(group_log=file).run()
    command = [sys.executable, "-W", "error", "-m", "upweight.rollout.group_log"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(" accepted: rewards [1.0], tokens [3]; task ") == 12


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"[1]\n", "is no log of groups: TypeError"),
        (b"{}\n", "is no log of groups: KeyError: 'fate'"),
        (b"nothing\n", "is no log of groups: JSONDecodeError"),
    ],
)
def test_what_is_no_log_of_groups_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, line: str
) -> None:
    file = tmp_path / "groups.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        browse([str(file), "--fate", "failed"])
    assert ended.value.code == 2
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_a_log_that_cannot_be_written_ends_no_run(
    server: Any, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full here")
    assert make_runner(group_log="/dev/full").run().batches_filled == 3
    assert sum("is given up" in r.message for r in caplog.records) == 1
