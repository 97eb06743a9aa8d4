"""Rollouts in actors of a real Ray on this machine. Its own processes take a while to start, so not in the default tier."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.fakes import FakeJobServer
from upweight.errors import RolloutError
from upweight.rollout.exceptions import WorkerPoolBroken
from upweight.rollout.graders import GraderPool
from upweight.rollout.models import SampleGroup

from . import helpers
from .grader_functions import by_order


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    module = pytest.importorskip("ray")
    yield module
    module.shutdown()


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*(Ray|ray).*:FutureWarning", "ignore::ResourceWarning")
class TestRay:
    def test_closures_run_in_actors_that_are_built_once(
        self, ray: Any, make_runner: Any, server: FakeJobServer
    ) -> None:
        extra = {"from": "a closure"}

        def rollout(task: int, context: Any) -> SampleGroup:
            group = helpers.pid_rollout(task, context)
            group.samples[0].metadata = extra
            return group

        summary = make_runner(rollout, executor_type="ray", max_concurrency=2, num_batches=4).run()
        assert summary.batches_filled == 4
        infos = [sample["debug_info"] for sample in server.samples()]
        pids = {info["pid"] for info in infos}
        assert os.getpid() not in pids
        assert len({(info["pid"], info["context"]) for info in infos}) == len(pids) <= 2
        assert {sample["metadata"]["from"] for sample in server.samples()} == {"a closure"}

    def test_a_killed_worker_is_replaced_and_the_run_goes_on(
        self, ray: Any, make_runner: Any, server: FakeJobServer
    ) -> None:
        summary = make_runner(helpers.dying_rollout, executor_type="ray", num_rollout_retries=1).run()
        assert summary.batches_filled == 3
        assert summary.failed == 1
        assert summary.retries == 1
        assert server.sizes() == {0: 4, 1: 4, 2: 4}

    def test_a_worker_killed_from_outside_costs_one_retry(
        self, ray: Any, make_runner: Any, server: FakeJobServer, tmp_path: Any
    ) -> None:
        def rollout(task: int, context: Any) -> SampleGroup:
            mark = tmp_path / "killed"
            if task == 3 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return helpers.rollout(task, context)

        summary = make_runner(rollout, executor_type="ray", num_rollout_retries=1).run()
        assert (summary.batches_filled, summary.failed, summary.retries) == (3, 0, 1)

    def test_workers_that_always_die_break_the_pool(self, ray: Any, make_runner: Any) -> None:
        with pytest.raises(WorkerPoolBroken, match="died in a row"):
            make_runner(helpers.always_dying_rollout, executor_type="ray", num_rollout_retries=9).run()

    def test_time_limits_errors_and_ends_leave_no_actor(self, ray: Any, make_runner: Any) -> None:
        summary = make_runner(
            helpers.hanging_rollout, executor_type="ray", rollout_timeout=2.0, allowed_staleness=None, num_batches=2
        ).run()
        assert (summary.batches_filled, summary.timed_out + summary.unfinished) == (2, 1)
        errors = make_runner(helpers.picky_rollout, executor_type="ray", num_batches=4).run()
        assert errors.rejected > 0
        names = [p.info["name"] or "" for p in psutil.process_iter(["name"])]
        assert not [name for name in names if "_Actor" in name and "ray::" in name and "attempt" in name]

    def test_a_grader_pool_travels_to_actors(self, ray: Any, make_runner: Any, server: FakeJobServer) -> None:
        """Reports R1 to R4: each actor has a grader of its own, which is killed and replaced like any other."""
        with GraderPool(by_order, workers=1, timeout=4.0) as pool:

            def rollout(task: int, context: Any) -> SampleGroup:
                score = pool.grade("loop" if task == 0 else "abc")
                return SampleGroup(samples=[helpers.good_sample(normalized_reward=score)])

            summary = make_runner(rollout, executor_type="ray", max_concurrency=2, num_batches=2).run()
        assert (summary.batches_filled, summary.failed) == (2, 0)
        assert sorted(sample["normalized_reward"] for sample in server.samples()) == [0.0] + [3.0] * 7

    def test_signals_still_stop_a_run(self, ray: Any) -> None:
        """Ray's own handler of SIGTERM does not take the place of ours."""
        with FakeJobServer() as server:
            script = (
                "import sys, time\nfrom upweight.api_client import TokenFactory\n"
                "from upweight.rollout import RolloutRunner\nfrom tests.rollout import helpers\n"
                "def rollout(task, context):\n    time.sleep(1 if task < 8 else 60)\n    return helpers.rollout(task, context)\n"
                "api = TokenFactory(sys.argv[1], 'k')\n"
                "settings = helpers.config(executor_type='ray', num_batches=None)\n"
                "print(RolloutRunner(api, settings, rollout, helpers.Counting()).run().reason)\n"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", script, server.url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            while not server.samples() and process.poll() is None:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert "stopped by SIGTERM" in process.communicate(timeout=60)[0]


def test_without_ray_the_extra_is_named(make_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RolloutError, match=r"pip install 'upweight\[ray\]'"):
        make_runner(executor_type="ray").run()
