"""Where runs are started from and where rollouts run: notebooks, other threads, -O, every start method, broken modules."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from upweight.rollout import RolloutRunner
from upweight.rollout.exceptions import WorkerPoolBroken
from upweight.rollout.graders import GraderPool
from upweight.rollout.models import SampleGroup

from . import helpers
from .grader_functions import by_order


@pytest.mark.parametrize("function", [helpers.rollout, helpers.async_rollout])
def test_run_inside_a_running_event_loop(server: Any, make_runner: Any, function: Any) -> None:
    """As in a notebook's cell, where a loop runs in the main thread."""

    async def cell() -> Any:
        return make_runner(function).run()

    assert asyncio.run(cell()).batches_filled == 3


def test_run_beside_a_running_event_loop(server: Any, make_runner: Any) -> None:
    """From a worker thread no signal handlers can be set; the loop goes on meanwhile."""

    async def cell() -> tuple[Any, int]:
        ticks = 0
        running = asyncio.create_task(asyncio.to_thread(make_runner(helpers.slow_rollout, num_batches=5).run))
        while not running.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return running.result(), ticks

    summary, ticks = asyncio.run(cell())
    assert summary.batches_filled == 5
    assert ticks > 3


def test_a_run_in_a_thread_can_be_stopped_from_outside(server: Any, make_runner: Any) -> None:
    runner = make_runner(helpers.slow_rollout, num_batches=None)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(runner.run()))
    thread.start()
    while not server.samples():
        time.sleep(0.01)
    runner.stop()
    thread.join(5)
    assert results[0].reason == "stopped"


def run_script(script: str, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", script, url],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )


def test_results_are_checked_under_python_o(server: Any) -> None:
    """Failure X4: no check is an `assert`."""
    script = textwrap.dedent("""
        import sys
        from tests.rollout import helpers
        from upweight.api_client import TokenFactory
        from upweight.rollout import RolloutRunner
        from upweight.rollout.models import SampleGroup
        from upweight.schedulers import DroplessRolloutScheduler, RolloutSchedulerConfig
        def rollout(task, context):
            return SampleGroup() if task == 0 else helpers.rollout(task, context)
        with TokenFactory(sys.argv[1], "k") as api:
            print(RolloutRunner(api, helpers.config(), rollout, helpers.Counting()).run().errors)
        config = RolloutSchedulerConfig(batch_size=2, num_samples_per_task=2, parallel_rollouts=2, allowed_staleness=0,
                                        drop_stale_trajectories=False)
        try:
            DroplessRolloutScheduler(config).add_sample_group("t", [])
        except AssertionError as error:
            print(error)
    """)
    done = run_script(script, server.url, "-O")
    assert done.stdout == "{'wrong_size': 1}\nTask t: expected 2 samples in the group, got 0\n", done.stderr


NOTEBOOK = textwrap.dedent("""
    import sys
    from tests.rollout import helpers
    from upweight.api_client import TokenFactory
    from upweight.rollout import RolloutRunner
    from upweight.rollout.exceptions import WorkerPoolBroken
    def rollout(task, context):
        return helpers.rollout(task, context)
    runner = RolloutRunner(TokenFactory(sys.argv[1], "k"), helpers.config(executor_type="process", max_concurrency=1), rollout,
                           helpers.Counting())
    try:
        runner.run()
    except WorkerPoolBroken as error:
        print(error)
""")


def test_a_function_that_workers_cannot_load_is_named(server: Any) -> None:
    """Failure H13 and beyond: it can be pickled here, but a cell of a notebook is no module that a child could import."""
    done = run_script(NOTEBOOK, server.url)
    assert "cannot load the rollout function: AttributeError" in done.stdout, done.stderr
    assert "executor_type='thread'" in done.stdout


@pytest.mark.ci
def test_a_script_without_a_main_guard_is_told_so(server: Any, tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, str(script), server.url],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "if __name__ == '__main__':" in done.stdout, done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_every_start_method_works_beside_live_threads(server: Any, make_runner: Any, method: str) -> None:
    """Failure W12 and "not confirmed": forking while threads and clients live."""
    summary = make_runner(
        helpers.pid_rollout, executor_type="process", process_start_method=method, max_concurrency=2
    ).run()
    assert summary.batches_filled == 3
    assert len({s["id"] for s in server.samples()}) == 12
    assert len({s["debug_info"]["pid"] for s in server.samples()}) <= 4


def test_ids_of_forked_workers_and_of_seeded_programs_differ() -> None:
    """Two processes, or two runs of a program that seeds `random`, must never give two samples one id."""
    import random

    from upweight.rollout.models import SampleID

    random.seed(7)
    first = SampleID.generate()
    random.seed(7)
    assert SampleID.generate() != first
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, SampleID.generate().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    forked = os.read(reader, 100).decode()
    os.close(reader)
    os.close(writer)
    assert len(forked) == len(first)
    assert forked != SampleID.generate()


class Graded:
    """A rollout function that holds a grader pool and is sent to worker processes."""

    def __init__(self, pool: GraderPool) -> None:
        self.pool = pool

    def __call__(self, task: int, context: Any) -> SampleGroup:
        order = "loop" if task == 0 else "abc"
        return SampleGroup(samples=[helpers.good_sample(normalized_reward=self.pool.grade(order))])


def test_a_grader_pool_travels_to_worker_processes(server: Any, make_runner: Any) -> None:
    """Reports R1 to R4 with `executor_type="process"`: a hanging grade costs one score there too."""
    with GraderPool(by_order, workers=2, timeout=1.0) as pool:
        summary = make_runner(Graded(pool), executor_type="process", max_concurrency=2, num_batches=2).run()
        assert pool.counts.total == 0
    assert (summary.batches_filled, summary.failed) == (2, 0)
    assert Counter_of(server) == {0.0: 1, 3.0: 7}


def Counter_of(server: Any) -> dict[float, int]:
    rewards = [sample["normalized_reward"] for sample in server.samples()]
    return {reward: rewards.count(reward) for reward in rewards}


def test_workers_that_die_cost_their_rollouts_only(server: Any, make_runner: Any) -> None:
    """Failure H11: through `run()`, with retries and without."""
    summary = make_runner(
        helpers.dying_rollout, executor_type="process", num_rollout_retries=1, max_concurrency=1
    ).run()
    assert (summary.batches_filled, summary.failed, summary.errors) == (3, 1, {"WorkerDied": 2})
    settings = {"executor_type": "process", "num_batches": 9, "max_concurrency": 1, "max_pool_restarts": 1}
    with pytest.raises(WorkerPoolBroken, match=r"exit codes \[7, 7\]"):
        make_runner(helpers.always_dying_rollout, **settings).run()


class UnpicklableError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("both")


def raises_unpicklable(task: int, context: Any) -> SampleGroup:
    if task == 0:
        raise UnpicklableError(1, 2)
    return helpers.rollout(task, context)


def test_exceptions_that_do_not_travel_are_reported(server: Any, make_runner: Any) -> None:
    settings = {"executor_type": "process", "max_concurrency": 1}
    summary = make_runner(raises_unpicklable, **settings).run()
    assert (summary.failed, summary.errors) == (1, {"UnpicklableError": 1})
    with pytest.raises(Exception, match="UnpicklableError: both") as caught:
        make_runner(raises_unpicklable, **settings, raise_on_rollout_failure=True, num_batches=9).run()
    assert "raises_unpicklable" in "".join(caught.value.__notes__)


def test_the_clients_of_a_closed_api_client_are_told(server: Any, api: Any) -> None:
    """Failure C8 through `run()`: a closed client is one clear line, not a hang."""
    runner = RolloutRunner(api, helpers.config(), helpers.rollout, helpers.Counting())
    api.close()
    with pytest.raises(RuntimeError, match="client is closed"):
        runner.run()
