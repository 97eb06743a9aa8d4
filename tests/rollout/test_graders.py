"""A grader that hangs, dies or misbehaves costs one score and one worker, never the run."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from upweight.rollout.graders import GraderCounts, GraderError, GraderPool

from .grader_functions import by_order

# Evaluating this tower of powers takes longer than anyone waits (measured: no end within 60 s).
TOWER = r"$9^{9^{9^{9}}}$"


@pytest.fixture(scope="module")
def pool():
    with GraderPool(by_order, workers=2, timeout=1.0) as running:
        yield running


@pytest.mark.parametrize(
    ("order", "kind", "said"),
    [
        ("loop", "timed_out", "took longer than 1"),
        ("swallow", "timed_out", "took longer than 1"),
        ("leave", "died", "exit code 7"),
        ("exit", "raised", "SystemExit: 3"),
        ("raise", "raised", "ValueError: no such answer"),
        ("huge", "raised", "the most is 1048576"),
        ("unpicklable", "raised", "lambda"),
        ("unloadable", "raised", "missing 1 required positional argument: 'b'"),
        ("loads_here", "raised", "the result cannot be unpickled: SystemExit: 9"),
    ],
)
def test_a_failing_grade_scores_zero_is_counted_and_named(
    pool: GraderPool, order: str, kind: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Reports R1, R2, R4."""
    before = pool.counts
    with caplog.at_level(logging.WARNING):
        assert pool.grade(order, name="sample-17") == 0.0
    assert getattr(pool.counts, kind) == getattr(before, kind) + 1
    assert pool.counts.total == before.total + 1
    assert "sample-17" in caplog.text
    assert said in caplog.text
    assert len(pool.pids) == 2
    assert [pool.grade("abc"), pool.grade("abcd")] == [3.0, 4.0]  # both workers work


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("not even this")


def test_arguments_that_cannot_be_shown_are_no_harm(pool: GraderPool, caplog: pytest.LogCaptureFixture) -> None:
    assert pool.grade(Unspeakable()) == 0.0
    assert "Grading arguments that cannot be shown, of types ['Unspeakable'] failed: " in caplog.text


def test_many_hanging_grades_leave_the_pool_at_its_size(pool: GraderPool) -> None:
    """Report R3."""
    orders = ["sleep", "ok", "leave", "loop", "ok", "ok"]
    scores: dict[int, float] = {}
    threads = [
        threading.Thread(target=lambda i=i, o=o: scores.update({i: pool.grade(o)})) for i, o in enumerate(orders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [scores[i] for i in range(6)] == [0.0, 2.0, 0.0, 0.0, 2.0, 2.0]
    assert len(set(pool.pids)) == 2
    assert all(psutil.Process(pid).is_running() for pid in pool.pids)


def test_coroutines_grade_without_blocking_their_loop(pool: GraderPool) -> None:
    async def main() -> tuple[list[float], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.02)
                ticks += 1

        ticking = asyncio.create_task(tick())
        scores = await asyncio.gather(*(pool.grade_async(order) for order in ["ab", "loop", "abc"]))
        ticking.cancel()
        return scores, ticks

    scores, ticks = asyncio.run(main())
    assert scores == [2.0, 0.0, 3.0]
    assert ticks > 10


@pytest.mark.parametrize("order", ["child", "own_session"])
def test_what_a_grader_started_is_killed_with_it(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report R3, also for programs that left the worker's session."""
    monkeypatch.setenv("GRADER_PID_FILE", str(tmp_path / "pid"))
    with GraderPool(by_order, workers=1, timeout=0.5) as pool:
        assert pool.grade(order) == 0.0
        pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 5
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_closing_leaves_no_process_and_no_file_open() -> None:
    me = psutil.Process()
    GraderPool(by_order, workers=1).close()  # starts multiprocessing's own resources
    before, files = {child.pid for child in me.children()}, me.num_fds()
    pool = GraderPool(by_order, workers=2, score_on_failure=-1.0, timeout=0.5)
    assert pool.grade("sleep") == -1.0
    pids = pool.pids
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert {child.pid for child in me.children()} == before
    assert me.num_fds() <= files
    with pytest.raises(RuntimeError, match="closed"):
        pool.grade("ok")


def test_a_grade_under_way_ends_when_the_pool_is_closed() -> None:
    pool = GraderPool(by_order, workers=1, timeout=30)
    assert pool.grade("ok") == 2.0
    threading.Timer(0.3, pool.close).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="closed"):
        pool.grade("sleep")
    assert time.monotonic() - began < 5


def test_errors_can_be_raised_and_bad_use_is_named() -> None:
    with (
        GraderPool(by_order, workers=1, raise_on_error=True) as pool,
        pytest.raises(GraderError, match=r"(?s)sample-3 failed.*no such answer"),
    ):
        pool.grade("raise", name="sample-3")
    with pytest.raises(TypeError, match="top of a module"):
        GraderPool(lambda x: x)
    assert GraderCounts(1, 2, 3, 4).total == 10


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, 1e12, "10", None])
@pytest.mark.parametrize("name", ["timeout", "start_timeout"])
def test_limits_that_cannot_be_kept_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {re.escape(repr(value))}; it must be above 0 and up to 86400"):
        GraderPool(by_order, **{name: value})


@pytest.mark.parametrize("value", [0, 1.5, True, None])
def test_a_number_of_workers_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"workers is {value!r}; it must be a whole number"):
        GraderPool(by_order, workers=value)


@pytest.mark.ci
def test_a_hanging_grader_does_not_outlive_a_killed_run() -> None:
    script = (
        "import sys; from upweight.rollout.graders import GraderPool\n"
        "from tests.rollout.grader_functions import by_order\n"
        "if __name__ == '__main__':\n"
        "    pool = GraderPool(by_order, workers=1, timeout=2.0); pool.grade('ok')\n"
        "    print(pool.pids[0], flush=True); pool.grade('loop')\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    grader = psutil.Process(int(run.stdout.readline()))
    time.sleep(0.5)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=10)
    _, alive = psutil.wait_procs([grader], timeout=10)
    assert alive == [] or alive[0].status() == psutil.STATUS_ZOMBIE


def test_an_answer_on_which_math_verify_hangs_scores_zero(caplog: pytest.LogCaptureFixture) -> None:
    """Reports R1 to R4: the literal input of a real library."""
    pytest.importorskip("math_verify")
    from .math_grader import grade_math

    with GraderPool(grade_math, workers=1, timeout=2.0) as pool, caplog.at_level(logging.WARNING):
        assert pool.grade("$4$", "$2+2$") == 1.0
        assert pool.grade("$1$", TOWER, name="sample-9") == 0.0
        assert pool.counts == GraderCounts(graded=1, timed_out=1)
    assert "sample-9" in caplog.text
