"""The start of a run: what the job tells then, limits on the wall clock, and failures that pass."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import tenacity

from tests.fakes import FakeJobServer, Fault, Reply
from upweight.api_client import TokenFactory
from upweight.rollout import JobInitializationTimeout, JobUnavailable, RolloutRunner, UploadFailed

from . import helpers


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_job_that_ended_before_it_served_is_told_at_once(server: Any, make_runner: Any, state: str) -> None:
    """Failure H8: with the job's own error, not after `job_init_timeout`."""
    server.version = None
    server.status_extra = {"job_status": state, "error": {"message": "out of memory"}}
    began = time.monotonic()
    with pytest.raises(JobUnavailable, match=f"{state}.*out of memory"):
        make_runner().run()
    assert time.monotonic() - began < 2


def test_a_finished_job_that_serves_no_more_returns_at_once(server: Any, make_runner: Any) -> None:
    """Failure H3: whether it tells its state or only its full batches."""
    server.version, server.trains = None, False
    server.status_extra = {"job_status": "succeeded"}
    assert make_runner().run().reason == "the job succeeded"
    for index in range(3):
        server.put_samples(index, 4)
    server.status_extra = {}
    assert make_runner().run().reason == "all batches were filled already"


@pytest.mark.parametrize("settings", [{"job_init_timeout": 0}, {"num_batches": 0}])
def test_an_early_end_leaves_no_event_loop_behind(server: Any, make_runner: Any, settings: dict[str, Any]) -> None:
    """Failure W5."""
    if "job_init_timeout" in settings:
        server.version = None
    before = set(threading.enumerate())
    with contextlib.suppress(JobInitializationTimeout):
        make_runner(helpers.async_rollout, **settings).run()
    assert [t.name for t in set(threading.enumerate()) - before if t.name == "rollout-loop"] == []


# -- limits on the wall clock


@pytest.mark.parametrize("timeout", [1, 3])
def test_a_client_with_long_time_outs_does_not_extend_the_start(server: Any, timeout: int) -> None:
    """Failure W6: one call is cut off too, also a call that began with much time left."""
    server.faults.append(Fault("/status", delay=timeout + 3, times=9))
    with TokenFactory(server.url, "k", httpx_client_factory=lambda: httpx.Client(timeout=60)) as api:
        runner = RolloutRunner(api, helpers.config(job_init_timeout=timeout), helpers.rollout, helpers.Counting())
        began = time.monotonic()
        with pytest.raises(JobInitializationTimeout):
            runner.run()
    assert time.monotonic() - began < timeout + 1


def drip(listener: socket.socket, done: threading.Event) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(9999)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not done.wait(0.1):
            connection.sendall(b" ")


def test_a_server_that_drips_its_answer_does_not_extend_the_start() -> None:
    """Failure W6: no read ever times out, the call still ends."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener, done), daemon=True)
        thread.start()
        began = time.monotonic()
        with TokenFactory(f"http://127.0.0.1:{listener.getsockname()[1]}", "k") as api:
            runner = RolloutRunner(api, helpers.config(job_init_timeout=1), helpers.rollout, helpers.Counting())
            with pytest.raises(JobInitializationTimeout):
                runner.run()
            took = time.monotonic() - began
            done.set()
            thread.join()
    assert took < 2


def test_a_stop_during_the_start_acts_at_once_and_opens_no_batch(server: Any, make_runner: Any) -> None:
    server.faults.append(Fault("/status", delay=4, times=9))
    runner = make_runner(job_init_timeout=None)
    threading.Timer(0.3, runner.stop).start()
    began = time.monotonic()
    assert runner.run().reason == "stopped"
    assert time.monotonic() - began < 1.3
    assert server.batches == {}


# -- failures that pass


PASSING = [(Reply(503, {}), 5), (Reply(0), 5), (Reply(409, {"detail": "filled meanwhile"}), 1)]


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    """Failure W6: nobody listens at the port for a while."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    servers: list[FakeJobServer] = []
    opening = threading.Timer(0.5, lambda: servers.append(FakeJobServer(port=port).__enter__()))
    opening.start()
    wait = tenacity.wait_fixed(0.02)
    with TokenFactory(f"http://127.0.0.1:{port}", "k", max_retries=1, tenacity_retry_wait=wait) as api:
        summary = RolloutRunner(api, helpers.config(), helpers.rollout, helpers.Counting()).run()
    servers[0].__exit__()
    assert (summary.batches_filled, summary.seconds >= 0.5) == (3, True)


def leave_samples(server: Any, make_runner: Any, **settings: Any) -> int:
    """A run whose samples stay in the spool; returns how many."""
    server.faults.append(Fault("/samples", Reply(500, {}), times=10**6))
    with pytest.raises(UploadFailed) as caught:
        make_runner(upload_timeout=0.1, **settings).run()
    server.faults.clear()
    return len(caught.value.samples)


@pytest.mark.parametrize(("reply", "times"), PASSING, ids=["5xx", "connection", "409"])
def test_a_batch_that_cannot_be_read_at_once_is_read_later(
    server: Any, make_runner: Any, reply: Reply, times: int
) -> None:
    """Failure W6: more faults than the client's own retries wait out, on both calls."""
    server.faults += [Fault("/batches/0", reply, times=times), Fault("/batches", reply, times=times)]
    assert make_runner().run().batches_filled == 3


@pytest.mark.parametrize(("reply", "times"), PASSING, ids=["5xx", "connection", "409"])
def test_spooled_samples_that_cannot_be_sent_at_once_are_sent_later(
    server: Any, make_runner: Any, tmp_path: Path, reply: Reply, times: int
) -> None:
    """Failures X10 and D5."""
    n = leave_samples(server, make_runner, spool_dir=tmp_path)
    server.faults += [Fault("/samples", reply, times=times, stored=reply.status == 503), Fault("/status", times=1)]
    summary = make_runner(spool_dir=tmp_path).run()
    assert (summary.batches_filled, summary.resumed_samples, summary.dropped_samples) == (3, n, 0)
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert not list(tmp_path.glob("**/*.jsonl"))


def test_spooled_samples_may_take_longer_than_the_limit_of_failing(
    server: Any, make_runner: Any, tmp_path: Path
) -> None:
    """Failure X10: a short `upload_timeout` cut off each request, so that these samples could never be sent."""
    left = leave_samples(server, make_runner, spool_dir=tmp_path)
    server.faults.append(Fault("/samples", delay=0.5, times=1))
    summary = make_runner(spool_dir=tmp_path, upload_timeout=0.1).run()
    assert (summary.batches_filled, summary.resumed_samples) == (3, left)


def test_a_batch_that_cannot_be_read_ends_the_start_in_time(server: Any, make_runner: Any) -> None:
    """Failure W6."""
    server.faults.append(Fault("/batches/0", Reply(503, {}), times=10**6))
    began = time.monotonic()
    with pytest.raises(JobInitializationTimeout, match=r"within 1 seconds.*Status code: 503"):
        make_runner(job_init_timeout=1).run()
    assert 0.9 < time.monotonic() - began < 2


def test_spooled_samples_that_cannot_be_sent_are_kept(server: Any, make_runner: Any, tmp_path: Path) -> None:
    """Failure X10."""
    n = leave_samples(server, make_runner, spool_dir=tmp_path)
    server.faults.append(Fault("/samples", Reply(503, {}), times=10**6))
    with pytest.raises(UploadFailed, match="spooled samples were not sent: Status code: 503") as caught:
        make_runner(spool_dir=tmp_path, upload_timeout=0.3).run()
    assert len(caught.value.samples) == len(list(tmp_path.glob("**/*.jsonl"))) == n


@pytest.mark.parametrize("hangs", ["/batches/0", "/samples"])
def test_a_stop_waits_for_no_call_of_the_start(server: Any, make_runner: Any, tmp_path: Path, hangs: str) -> None:
    """Not for one that hangs, and not for the pause after one that failed."""
    n = leave_samples(server, make_runner, spool_dir=tmp_path) if hangs == "/samples" else 0
    for fault in (Fault(hangs, delay=3, times=9), Fault(hangs, Reply(503, {}), times=10**6)):
        server.faults = [fault]
        runner = make_runner(spool_dir=tmp_path)
        threading.Timer(0.3, runner.stop).start()
        began = time.monotonic()
        assert runner.run().reason == "stopped"
        assert time.monotonic() - began < 0.8
        assert len(list(tmp_path.glob("**/*.jsonl"))) == n


# -- the clock of `no_progress_timeout`


def test_waiting_for_the_job_is_no_lack_of_progress(server: Any, make_runner: Any) -> None:
    """Failure H1: the limit begins when rollouts can start."""
    server.version = None
    threading.Timer(1.0, lambda: setattr(server, "version", 0)).start()
    assert make_runner(no_progress_timeout=0.7).run().batches_filled == 3


def test_an_evaluation_is_no_lack_of_progress(server: Any, api: Any) -> None:
    def slow(task: int, context: Any) -> dict[str, float]:
        time.sleep(1.0)
        return {"score": 1.0}

    config = helpers.config(num_batches=1, no_progress_timeout=0.6)
    runner = RolloutRunner(api, config, helpers.rollout, helpers.Counting(), eval_dataset=[1], eval_fn=slow)
    assert runner.run().evaluations == {0: {"score": 1.0}, 1: {"score": 1.0}}


def test_the_wait_for_the_last_version_is_named_and_no_lack_of_progress(server: Any, api: Any) -> None:
    server.trains = False
    config = helpers.config(num_batches=1, no_progress_timeout=0.5)
    evaluation = {"eval_dataset": [1], "eval_fn": lambda task, context: {"score": 1.0}}
    runner = RolloutRunner(api, config, helpers.rollout, helpers.Counting(), **evaluation)
    seen: list[str] = []

    def publish() -> None:
        progress = runner.progress()
        seen.append(str(progress and progress.waiting_for))
        server.version = 1

    threading.Timer(1.5, publish).start()
    assert runner.run().evaluations == {0: {"score": 1.0}, 1: {"score": 1.0}}
    assert seen == ["version 1, the last one, to evaluate it"]


# -- the end


def test_the_end_takes_one_shutdown_timeout_in_all(server: Any, make_runner: Any) -> None:
    """Failure W3: sending the rest and ending the threads share it."""
    server.faults.append(Fault("/samples", delay=4, times=9))
    runner = make_runner(shutdown_timeout=1.0)
    stopped: list[float] = []
    threading.Timer(0.5, lambda: (stopped.append(time.monotonic()), runner.stop())).start()
    assert runner.run().unsent_samples > 0
    assert time.monotonic() - stopped[0] < 2.0


GROUP = textwrap.dedent("""
    import os, signal, sys, threading
    from tests.rollout import helpers
    from upweight.api_client import TokenFactory
    from upweight.rollout import RolloutRunner

    def watch():
        while runner.progress() is None or runner.progress().counts.accepted < 200:
            threading.Event().wait(0.05)
        os.killpg(os.getpgrp(), signal.SIGTERM)

    if __name__ == "__main__":
        settings = {"executor_type": "process", "max_concurrency": 2, "max_pool_restarts": 0, "num_batches": None}
        api = TokenFactory(sys.argv[1], "k")
        config = helpers.config(raise_on_rollout_failure=True, **settings)
        runner = RolloutRunner(api, config, helpers.slow_rollout, helpers.Counting())
        threading.Thread(target=watch, daemon=True).start()
        print(runner.run().reason)
""")


STARTING = (
    GROUP.replace("import os", "import multiprocessing, os, time")
    .replace(
        "while runner.progress() is None or runner.progress().counts.accepted < 200:",
        "while len(multiprocessing.active_children()) < 2:",
    )
    .replace(
        "if __name__",
        """if __name__ == "__mp_main__":
    time.sleep(1)

if __name__""",
        1,
    )
    .replace("SIGTERM", "{name}")
)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_the_whole_group_stops_a_run_whose_workers_are_starting(
    server: Any, tmp_path: Path, name: str
) -> None:
    """Failure H11: a worker that dies of it before it can leave the signal to its parent would break the pool."""
    done = run_group(STARTING.replace("{name}", name), server.url, tmp_path)
    assert (done.stdout, done.returncode) == (f"stopped by {name}\n", 0), done.stderr


def test_a_sigterm_to_the_whole_group_stops_the_run(server: Any, tmp_path: Path) -> None:
    """Worker processes leave the signal to their parent."""
    done = run_group(GROUP, server.url, tmp_path)
    assert (done.stdout, done.returncode) == ("stopped by SIGTERM\n", 0), done.stderr


def run_group(script_text: str, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "group.py"
    script.write_text(script_text)
    return subprocess.run(
        [sys.executable, str(script), url],
        capture_output=True,
        text=True,
        timeout=40,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
