"""Kills, signals, hangs and servers that leave: a run ends, says why, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tenacity

from tests.fakes import FakeJobServer, Fault, Reply
from upweight.api_client import TokenFactory
from upweight.rollout import JobUnavailable, RolloutRunner, RolloutValidationError, UploadFailed, uploader, waits
from upweight.rollout.dispatcher import RolloutDispatcher
from upweight.rollout.group_log import read_groups
from upweight.rollout.models import SampleGroup

from . import helpers
from .test_runner import assert_adds_up, open_files

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick_upload_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "FIRST_WAIT_S", 0.05)


# -- reports on demand


def where_it_hangs(task: int, context: Any) -> SampleGroup:
    time.sleep(5)
    return helpers.rollout(task, context)


async def where_it_awaits(task: int, context: Any) -> SampleGroup:
    await asyncio.sleep(5)
    return helpers.rollout(task, context)


@pytest.mark.parametrize("function", [where_it_hangs, where_it_awaits])
def test_a_report_shows_where_rollouts_are(server: Any, make_runner: Any, function: Any) -> None:
    """Reports H8 and H11: from any thread, names and stacks of what is pending, and what the run waits for."""
    runner = make_runner(function)
    assert runner.report() == "no run is under way"
    thread = threading.Thread(target=runner.run)
    thread.start()
    deadline = time.monotonic() + 5
    while (report := runner.report()).count(f"in {function.__name__}") < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    runner.stop()  # also before an assertion fails: a run that is left behind would disturb the tests after it
    thread.join(8)
    assert report.count(f"in {function.__name__}") == 4
    assert re.search(
        r"waiting for \d s for group 0: rollout function still running \(task-\w+\), \d s for group 1 \(", report
    )
    assert "attempt 1" in report


SCRIPT = textwrap.dedent("""
    import logging, sys, threading, time
    from pathlib import Path
    from tests.rollout import helpers
    from upweight.api_client import TokenFactory
    from upweight.rollout import RolloutRunner
    logging.basicConfig(level=logging.INFO)

    def hang(task, context):
        if task == 0:
            if "process" in sys.argv[2:]:
                print("hanging", flush=True)
            time.sleep(60)
        if "raise" in sys.argv[2:]:
            raise KeyError("the end")
        time.sleep(0.01)
        return helpers.rollout(task, context)

    settings = {"num_batches": None, "allowed_staleness": None, "shutdown_timeout": 1.0}
    if "raise" in sys.argv[2:]:
        settings["raise_on_rollout_failure"] = True
    if "spool" in sys.argv[2:]:
        settings["spool_dir"], settings["group_log"] = Path("spool"), Path("groups")
        settings["shutdown_timeout"] = 30.0
    if "process" in sys.argv[2:]:
        settings["executor_type"] = "process"
    if "fork" in sys.argv[2:]:
        settings["process_start_method"] = "fork"
    if __name__ == "__main__":
        api = TokenFactory(sys.argv[1], "k")
        print("running", flush=True)
        print(RolloutRunner(api, helpers.config(**settings), hang, helpers.Counting()).run().reason, flush=True)
""")


def start_script(folder: Path, url: str, *arguments: str) -> subprocess.Popen[str]:
    script = folder / "hang.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), url, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


def test_sigusr1_logs_a_report_and_the_run_goes_on(server: Any, tmp_path: Path) -> None:
    """Report H11: a look inside without a debugger."""
    process = start_script(tmp_path, server.url)
    while len(server.samples()) < 4:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    stored = len(server.samples())
    while len(server.samples()) < stored + 8:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert out == "stopped by SIGINT\n"
    assert "in hang" in err
    assert "time.sleep(60)" in err


def test_a_signal_ends_the_wait_for_a_job_that_does_not_serve(server: Any, tmp_path: Path) -> None:
    server.version = None
    process = start_script(tmp_path, server.url)
    while server.count("GET", "/status") < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "stopped by SIGTERM\n")


def test_closing_the_api_client_in_the_middle_ends_the_run(server: Any, api: Any, make_runner: Any) -> None:
    """Failure C8: by the error that says so, wherever it strikes first."""

    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 6:
            api.close()
        return helpers.rollout(task, context)

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="client is closed"):
        make_runner(rollout, num_batches=None).run()
    assert time.monotonic() - began < 6


def test_answers_with_the_least_that_the_contract_asks_for(server: Any, make_runner: Any) -> None:
    """A server may leave out status and count of a batch, and tell more than we know."""
    answer = server.answer

    def terse(request: Any) -> Reply:
        reply = answer(request)
        if reply.status == 200 and "batches" in request.path:
            return Reply(body={"index": reply.body["index"], "sample_count": None, "news": [1]})
        return reply

    server.answer = terse
    assert make_runner().run().batches_filled == 3
    assert server.sizes() == {0: 4, 1: 4, 2: 4}


def test_a_second_sigint_interrupts_what_the_first_one_waits_for(server: Any, tmp_path: Path) -> None:
    """Failures H10 and X10: a first KeyboardInterrupt waits for uploads, an impatient one does not; the spool keeps the samples."""
    process = start_script(tmp_path, server.url, "spool")
    while len(server.samples()) < 4:
        time.sleep(0.02)
    server.faults.append(Fault("/samples", delay=20, times=10**6))
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert time.monotonic() - began < 2.5
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0
    kept = [json.loads(line) for file in tmp_path.glob("spool/*/*.jsonl") for line in file.read_bytes().splitlines()]
    accepted = [g["samples"][0]["id"] for g in read_groups(tmp_path / "groups") if g["fate"] == "accepted"]
    assert len(kept) >= 4
    assert set(accepted) == {sample["id"] for sample in [*kept, *server.samples()]}


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_an_error_ends_the_process_whatever_other_rollouts_do(server: Any, tmp_path: Path, executor: str) -> None:
    """Failure W3: the interpreter exits soon after `run()` has raised; a hanging worker process is killed."""
    process = start_script(tmp_path, server.url, "raise", executor)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "KeyError: 'the end'" in err


# -- kills


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_worker_processes_do_not_outlive_a_killed_run(server: Any, tmp_path: Path, method: str) -> None:
    """Failure W3: also what hangs inside them ends."""
    process = start_script(tmp_path, server.url, "process", method)
    assert process.stdout is not None
    assert process.stdout.readline() == "hanging\n"
    workers = psutil.Process(process.pid).children(recursive=True)
    while len(workers) < 2:  # the second one may still be on its way
        time.sleep(0.02)
        workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=10)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


CLIENT = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from tests.rollout import helpers
    from upweight.api_client import TokenFactory
    from upweight.rollout import RolloutRunner
    from upweight.rollout.datasets import SequenceDataset
    from upweight.rollout.models import SampleGroup

    def rollout(task, context):
        time.sleep(0.01)
        return SampleGroup(samples=[helpers.good_sample(metadata={"task": str(task)}) for _ in range(2)])

    settings = {"num_batches": 30, "batch_size": 8, "num_samples_per_task": 2, "max_concurrency": 8,
                "allowed_staleness": 2, "spool_dir": Path(sys.argv[2]), "upload_timeout": 60}
    with TokenFactory(sys.argv[1], "k") as api:
        summary = RolloutRunner(api, helpers.config(**settings), rollout, SequenceDataset(list(range(120)))).run()
        print(summary.batches_filled, summary.resumed_samples, summary.stored_before, summary.dropped_samples)
""")


IMPORTS_END = "from upweight.rollout.models import SampleGroup\n"


@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.soak if seed > 1 else pytest.mark.ci) for seed in range(1, 6))],
)
def test_a_killed_client_loses_nothing_and_doubles_nothing(seed: int, tmp_path: Path) -> None:
    """Failures D1, X10 and report P1: kill -9 again and again; each task of the data is trained on exactly once."""
    rng = random.Random(seed)
    resumed = 0
    with FakeJobServer(batch_size=8) as server:
        for attempt in range(8):
            process = subprocess.Popen(
                [sys.executable, "-c", CLIENT, server.url, str(tmp_path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            target = len(server.samples()) + rng.randint(10, 60)
            if rng.random() < 0.7:  # the next upload is stored, but the client never hears of it
                server.faults.append(Fault("/samples", delay=0.5, stored=True))
            while process.poll() is None and (attempt == 7 or len(server.samples()) < target):
                time.sleep(0.01)
            process.kill()
            out, err = process.communicate(timeout=60)
            server.faults.clear()
            if process.returncode == 0:
                filled, n_resumed, stored_before, dropped = map(int, out.split())
                assert (filled, dropped) == (30, 0)
                resumed += n_resumed
                assert stored_before <= n_resumed
                break
        assert server.sizes() == dict.fromkeys(range(30), 8), err
        tasks = sorted(int(sample["metadata"]["task"]) for sample in server.samples())
        assert len({sample["id"] for sample in server.samples()}) == 240
        assert tasks == sorted([*range(120), *range(120)])  # each with its group of two


DIES = {
    "after a group was spooled": """
from upweight.rollout.cursor import DataCursor
def save(self, save=DataCursor.save, calls=iter(range(999))):
    os._exit(9) if self._is_dirty and next(calls) == 3 else save(self)
DataCursor.save = save
""",
    "after a group was stored": """
from upweight.rollout.uploader import Uploader
def put(self, samples, put=Uploader.put, calls=iter(range(999))):
    put(self, samples)
    if next(calls) == 4:
        while self.backlog:
            self.hurry()
            time.sleep(0.01)
        os._exit(9)
Uploader.put = put
""",
}


@pytest.mark.parametrize("when", DIES)
def test_a_client_that_dies_between_two_steps_repeats_no_task(server: Any, tmp_path: Path, when: str) -> None:
    """Report P1: spool, then cursor, then upload; a death after each of them."""
    server.batch_size = 8
    command = [sys.executable, "-c", f"import os\n{CLIENT.replace(IMPORTS_END, IMPORTS_END + DIES[when])}"]
    died = subprocess.run([*command, server.url, str(tmp_path)], cwd=ROOT, timeout=60, check=False)
    assert died.returncode == 9
    done = subprocess.run([sys.executable, "-c", CLIENT, server.url, str(tmp_path)], cwd=ROOT, timeout=60, check=True)
    assert done.returncode == 0
    tasks = sorted(int(sample["metadata"]["task"]) for sample in server.samples())
    assert tasks == sorted([*range(120), *range(120)])


def test_the_counts_of_a_resumption_are_told(server: Any, make_runner: Any, tmp_path: Path, caplog: Any) -> None:
    """After a crash the next run says what it found: so many stored before, so many now, none lost or doubled."""
    server.faults.append(Fault("/samples", Reply(502, {}), times=10**6, stored=True))
    with pytest.raises(UploadFailed):
        make_runner(upload_timeout=0.1, spool_dir=tmp_path, num_batches=2, allowed_staleness=1).run()
    server.faults.clear()
    unsent = len(list(tmp_path.glob("**/*.jsonl")))
    known = len(server.samples())
    assert known >= 1
    with caplog.at_level(logging.WARNING):  # what a script shows that has no logging set up
        summary = make_runner(spool_dir=tmp_path, num_batches=2, allowed_staleness=1).run()
    assert (summary.resumed_samples, summary.stored_before) == (unsent, known)
    assert f"of {unsent} samples of an earlier run {known} were stored already" in caplog.text
    assert "0 lost, 0 doubled" in caplog.text
    assert server.sizes() == {0: 4, 1: 4}


def test_a_server_that_restarts_costs_nothing(api: Any, make_runner: Any, server: Any) -> None:
    """The connection breaks in the middle; uploads go on where they were, once the server is back with what it had."""
    runner = make_runner(helpers.slow_rollout, num_batches=20, allowed_staleness=None)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(runner.run()))
    thread.start()
    while len(server.samples()) < 12:
        time.sleep(0.005)
    server.faults.append(Fault("", Reply(503, {}), times=10**6))
    time.sleep(0.4)
    server.faults.clear()
    thread.join(20)
    assert results[0].batches_filled == 20
    assert len({sample["id"] for sample in server.samples()}) == 80
    assert_adds_up(results[0])


def test_a_server_that_leaves_after_the_last_sample_strands_nobody(tmp_path: Path) -> None:
    """Report H6: either side may leave first."""
    with FakeJobServer() as server, TokenFactory(server.url, "k", tenacity_retry_wait=tenacity.wait_fixed(0.01)) as api:
        answer = server.answer

        def leaving(request: Any) -> Reply:
            reply = answer(request)
            if server.filled >= 3:
                server.faults.append(Fault("/status", Reply(404, {"detail": "gone"}), times=10**6))
                server.faults.append(Fault("/batches", Reply(404, {"detail": "gone"}), times=10**6))
            return reply

        server.answer = leaving  # type: ignore[method-assign]
        summary = RolloutRunner(api, helpers.config(), helpers.rollout, helpers.Counting()).run()
    assert (summary.batches_filled, summary.reason) == (3, "all batches are filled")


# -- errors that leave run()


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), RecursionError("deep")])
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_rollout_raises_comes_out_of_run(
    server: Any, make_runner: Any, error: BaseException, is_async: bool
) -> None:
    """Failure H10 and report H5: the original exception, with its traceback, in the caller."""

    def rollout(task: int, context: Any) -> SampleGroup:
        raise error

    async def rollout_async(task: int, context: Any) -> SampleGroup:
        raise error

    function = rollout_async if is_async else rollout
    with pytest.raises(type(error)) as caught:
        make_runner(function, raise_on_rollout_failure=True).run()
    assert caught.value is error
    assert function.__name__ in [entry.name for entry in caught.traceback]


def test_a_dispatcher_that_dies_ends_the_run_with_its_error(
    server: Any, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure H11 and report H1: a fatal error of a producer reaches the caller at once."""

    def broken(self: Any) -> None:
        raise OSError("no more threads")

    monkeypatch.setattr(RolloutDispatcher, "_start_attempts", broken)
    began = time.monotonic()
    with pytest.raises(OSError, match="no more threads"):
        make_runner().run()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_in_the_middle_ends_the_run_at_once(server: Any, make_runner: Any, status: int) -> None:
    """Failure H8: a key that was withdrawn is not polled until `status_failure_timeout`."""

    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 2:
            server.faults.append(Fault("/status", Reply(status, {"detail": "withdrawn"}), times=10**6))
        return helpers.rollout(task, context)

    began = time.monotonic()
    with pytest.raises(JobUnavailable, match="withdrawn"):
        make_runner(rollout, num_batches=None).run()
    assert time.monotonic() - began < 5


BAD_SAMPLES: list[dict[str, Any]] = [
    {"logprobs": [0.0, float("nan"), -0.2]},
    {"logprobs": [0.0, float("-inf"), -0.2]},
    {"normalized_reward": float("nan")},
    {"normalized_reward": "1.0"},
    {"normalized_reward": None},
    {"mask": [0, 1, 2]},
    {"mask": [0, 1]},
    {"mask": [0, 1, 0.5]},
    {"token_ids": [1, 2, -3]},
    {"token_ids": [1, 2, 2**40]},
    {"token_ids": [], "logprobs": [], "mask": []},
    {"metadata": {"k": 1}},
    {"metadata": {1: "k"}},
    {"metadata": ["k"]},
    {"metadata": {"k": "half \ud83d"}},
    {"debug_info": {"k": {1, 2}}},
    {"debug_info": {"k": object()}},
    {"debug_info": {"k": float("nan")}},
    {"debug_info": {"k": "half \ud83d"}},
    {"debug_info": {(1, 2): "k"}},
    {"debug_info": ["k"]},
]


@pytest.mark.parametrize("change", BAD_SAMPLES, ids=map(str, range(len(BAD_SAMPLES))))
def test_bad_values_never_reach_an_upload(server: Any, make_runner: Any, change: dict[str, Any]) -> None:
    """Failures X5, X6, D6: the group is a failed rollout whose message names sample and field."""

    def rollout(task: int, context: Any) -> SampleGroup:
        return SampleGroup(samples=[helpers.good_sample(), helpers.good_sample(**change)])

    field = next(iter(change))
    with pytest.raises(RolloutValidationError, match=rf"sample 1: .*{field}"):
        make_runner(rollout, num_samples_per_task=2, raise_on_rollout_failure=True).run()
    assert server.samples() == []


def test_a_deep_or_circular_debug_info_is_named(server: Any, make_runner: Any) -> None:
    """Failure X6."""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    circular: dict[str, Any] = {}
    circular["self"] = circular
    for value in (deep, circular):

        def rollout(task: int, context: Any, value: Any = value) -> SampleGroup:
            return SampleGroup(samples=[helpers.good_sample(debug_info={"k": value})])

        with pytest.raises(RolloutValidationError, match=r"debug_info\['k'\]"):
            make_runner(rollout, raise_on_rollout_failure=True).run()


def test_stamps_of_the_run_take_the_place_of_the_users(server: Any, make_runner: Any) -> None:
    info = {"starting_inference_version": 99, "task_id": 'quo"ted', "kept": "ü"}

    def rollout(task: int, context: Any) -> SampleGroup:
        return SampleGroup(samples=[helpers.good_sample(debug_info=dict(info))])

    make_runner(rollout, num_batches=1).run()
    for sample in server.samples():
        assert sample["debug_info"]["starting_inference_version"] == 0
        assert sample["debug_info"]["task_id"].startswith("task-")
        assert sample["debug_info"]["kept"] == "ü"


# -- bounds


def test_failing_uploads_bound_the_backlog(server: Any, make_runner: Any) -> None:
    """Failure X10: rollouts go on while uploads fail, but not without end."""
    server.faults.append(Fault("/samples", Reply(500, {}), times=10**6))
    runner = make_runner(num_batches=None, allowed_staleness=None, shutdown_timeout=0.2)
    thread = threading.Thread(target=runner.run)
    thread.start()
    time.sleep(1.0)
    progress = runner.progress()
    assert 16 <= progress.backlog <= 16 + 4 + 4  # four batches, and what was in flight
    assert "upload of" in progress.waiting_for
    assert "last error: InternalServerError" in progress.waiting_for
    runner.stop()
    thread.join(8)


def test_a_dataset_that_gives_too_much_exceeds_no_budget(server: Any, make_runner: Any) -> None:
    """Failures X7 and W2: the surplus is kept for the next request; exactly what is needed is started."""

    class Generous(helpers.Counting):
        def sample(self, n_samples: int) -> list[int]:
            return super().sample(n_samples + 50)

    seen: list[int] = []

    def rollout(task: int, context: Any) -> SampleGroup:
        seen.append(task)
        return helpers.rollout(task, context)

    server.put_samples(0, 2)
    summary = make_runner(rollout, dataset=Generous()).run()
    assert summary.started == 10
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize(
    "kind", [None, 5, "abc", {"a": 1}, {1}, (x for x in "abc")], ids=lambda kind: type(kind).__name__
)
def test_odd_datasets(server: Any, make_runner: Any, kind: Any) -> None:
    """What cannot be gone through is the dataset's error; anything that can is."""

    class Odd:
        calls = 0

        def sample(self, n: int) -> Any:
            self.calls += 1
            return kind if self.calls == 1 else []

    runner = make_runner(dataset=Odd(), num_batches=None)
    if kind is None or kind == 5:
        with pytest.raises(TypeError, match=rf"Odd.sample\(\d+\) returned {kind}, which is not iterable"):
            runner.run()
    else:
        assert runner.run().accepted == len(list(kind)) if not hasattr(kind, "__next__") else 3


def test_large_samples_go_in_several_requests(server: Any, make_runner: Any, monkeypatch: Any) -> None:
    """Failure W9: ready samples travel together, in requests of bounded size."""
    monkeypatch.setattr(uploader, "MAX_BYTES", 20_000)
    server.batch_size = 16

    def rollout(task: int, context: Any) -> SampleGroup:
        n = 20_000 if task == 3 else 500
        return SampleGroup(samples=[helpers.good_sample(token_ids=[7] * n, logprobs=[-0.5] * n, mask=[1] * n)])

    make_runner(rollout, batch_size=16, num_batches=2, max_concurrency=16, allowed_staleness=None).run()
    sizes = [len(r.raw) for r in server.requests if r.path.endswith("/samples")]
    assert server.sizes() == {0: 16, 1: 16}
    assert sum(size > 25_000 for size in sizes) == 1  # a single sample that is larger
    assert len(sizes) <= 14


def limited(server: FakeJobServer, max_bytes: int) -> None:
    answer = server.answer

    def limiting(request: Any) -> Reply:
        return Reply(413, {"detail": "too large"}) if len(request.raw) > max_bytes else answer(request)

    server.answer = limiting  # type: ignore[method-assign]


def test_a_server_that_takes_less_at_once_gets_less(server: Any, make_runner: Any, tmp_path: Path) -> None:
    """Failure W9: any server of the contract may have a bound of its own, also for what was spooled."""
    server.batch_size = 32
    settings = {"batch_size": 32, "num_batches": 2, "max_concurrency": 32, "allowed_staleness": None}
    limited(server, 1000)  # a sample takes about 300 bytes
    assert make_runner(**settings).run().batches_filled == 2
    server.batches.clear()
    server.ids.clear()
    server.version = 0
    fault = Fault("/samples", Reply(500, {}), times=10**6)
    server.faults.append(fault)
    with pytest.raises(UploadFailed):
        make_runner(**settings, spool_dir=tmp_path, upload_timeout=0.1).run()
    server.faults.clear()
    summary = make_runner(**settings, spool_dir=tmp_path).run()
    assert summary.resumed_samples >= 32
    assert server.sizes() == {0: 32, 1: 32}
    with FakeJobServer() as tiny, TokenFactory(tiny.url, "k") as api:
        limited(tiny, 100)
        with pytest.raises(UploadFailed, match="too large"):
            RolloutRunner(api, helpers.config(), helpers.rollout, helpers.Counting()).run()


def test_samples_wait_for_company_but_not_at_the_end(server: Any, make_runner: Any, monkeypatch: Any) -> None:
    """Failure W9: an eighth of a batch goes at once, less waits; the last ones of a run wait for nobody."""
    monkeypatch.setattr(uploader, "COLLECT_S", 30.0)
    server.batch_size = 64
    began = time.monotonic()
    runner = make_runner(
        helpers.slow_rollout, dataset=helpers.Counting(67), batch_size=64, num_batches=None, max_concurrency=4
    )
    summary = runner.run()
    assert summary.accepted == 67
    assert server.count("POST", "/samples") <= 8 + 1
    assert server.sizes() == {0: 64, 1: 3}
    assert time.monotonic() - began < 10


def test_waiting_for_a_job_is_not_silent(server: Any, make_runner: Any, monkeypatch: Any, caplog: Any) -> None:
    """Every wait names its cause, also the one before the job serves."""
    monkeypatch.setattr(waits, "WARN_EVERY_S", 0.1)
    server.version = None
    runner = make_runner()
    threading.Timer(0.6, runner.stop).start()
    assert runner.run().reason == "stopped"
    assert "does not serve since" in caplog.text
    assert "inference_version is still null" in caplog.text


def test_the_stall_line_names_tasks_and_ages(server: Any, make_runner: Any, monkeypatch: Any, caplog: Any) -> None:
    """Failure H14 and report H8: without a time limit the pending task is named, with its age."""
    monkeypatch.setattr(waits, "WARN_EVERY_S", 0.3)
    runner = make_runner(helpers.hanging_rollout, num_batches=1, max_concurrency=1)
    threading.Timer(1.0, runner.stop).start()
    runner.run()
    lines = [r.getMessage() for r in caplog.records if "No progress" in r.getMessage()]
    assert lines
    assert re.search(r"waiting for \d s for group 0: rollout function still running \(task-\w+\)$", lines[0])


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_nothing_is_left_after_an_error(server: Any, make_runner: Any, executor: str) -> None:
    """Failure W5: threads, processes and descriptors of a run that raised."""

    def run() -> None:
        with pytest.raises(ValueError, match="no luck"):
            make_runner(
                helpers.unlucky_rollout, executor_type=executor, raise_on_rollout_failure=True, max_concurrency=1
            ).run()

    run()
    files, threads = open_files(), set(threading.enumerate())
    run()
    deadline = time.monotonic() + 3
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [t.name for t in set(threading.enumerate()) - threads if t.name.startswith("rollout-")] == []
    assert len(open_files()) <= len(files)


def test_two_runs_of_one_runner_at_the_same_time_are_refused(server: Any, make_runner: Any) -> None:
    """Failure X11: one after the other is fine; at the same time they would share queue and stop signal."""
    runner = make_runner(helpers.slow_rollout, num_batches=None)
    thread = threading.Thread(target=runner.run)
    thread.start()
    while not server.samples():
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="already running"):
        runner.run()
    runner.stop()
    thread.join(5)
    assert not thread.is_alive()


def test_a_hanging_remote_reward_is_bounded(server: Any, make_runner: Any) -> None:
    """Report R7: a call that stalls is a failed attempt; after its retries the error is counted, the run goes on."""

    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 1:
            threading.Event().wait(60)
        return helpers.rollout(task, context)

    summary = make_runner(rollout, rollout_timeout=0.3, num_rollout_retries=1).run()
    assert (summary.batches_filled, summary.timed_out, summary.errors) == (3, 1, {"RolloutTimeout": 2})


def test_a_hanging_evaluation_task_does_not_hold_the_run(server: Any, api: Any, caplog: Any) -> None:
    def score(task: int, context: Any) -> dict[str, float]:
        if task == 2:
            threading.Event().wait(60)
        return {"score": float(task)}

    runner = RolloutRunner(
        api,
        helpers.config(rollout_timeout=0.3),
        helpers.rollout,
        helpers.Counting(),
        eval_dataset=[1, 2, 3],
        eval_fn=score,
    )
    assert runner.run().evaluations == {0: {"score": 2.0}, 3: {"score": 2.0}}
    assert "it does not count" in caplog.text


def test_the_requests_of_a_run_are_those_of_the_contract(server: Any, make_runner: Any) -> None:
    """`rollout-sdk.md` 3.8: ready, where it stands, open what is not open; none after the last batch."""
    make_runner(max_concurrency=1).run()
    calls = [(r.method, r.path.removeprefix("/v1alpha1/fine_tuning/jobs/job-1/")) for r in server.requests]
    assert calls[:4] == [("GET", "status"), ("GET", "status"), ("GET", "batches/0"), ("POST", "batches")]
    assert [r.body for r in server.requests if r.path.endswith("/batches")] == [{"index": n} for n in range(3)]
    assert {path for method, path in calls if method == "POST"} == {
        "batches",
        *(f"batches/{n}/samples" for n in range(3)),
    }
    assert all(sample["object"] == "fine_tuning.rl_sample" for sample in server.samples())
    fields = {"object", "id", "token_ids", "logprobs", "mask", "normalized_reward", "metadata", "debug_info"}
    assert all(set(sample) == fields for sample in server.samples())


def test_clients_of_a_run_are_closed_with_it(server: Any, make_runner: Any) -> None:
    """Failure W5."""
    seen: list[Any] = []

    def rollout(task: int, context: Any) -> SampleGroup:
        seen.append(context.openai_client)
        return helpers.rollout(task, context)

    make_runner(rollout).run()
    assert len(set(map(id, seen))) == 1
    assert seen[0].is_closed()


def test_a_client_factory_that_does_not_travel_is_named_before_anything_starts(server: Any) -> None:
    """Failure W12."""
    import httpx

    dataset = helpers.Counting()
    with TokenFactory(server.url, "k", httpx_client_factory=lambda: httpx.Client()) as api:
        runner = RolloutRunner(api, helpers.config(executor_type="process"), helpers.rollout, dataset)
        with pytest.raises(TypeError, match="HTTP client factory"):
            runner.run()
    assert (dataset.served, server.requests) == (0, [])
