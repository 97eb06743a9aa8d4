"""Whole runs in which something goes wrong."""

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.fakes import FakeJobServer, Fault, Reply, calls_by_key
from upweight.api_client import BadRequestError, InternalServerError
from upweight.rollout import (
    BatchSizeMismatch,
    DatasetExhausted,
    JobInitializationTimeout,
    JobUnavailable,
    RolloutStalled,
    RolloutValidationError,
    UploadFailed,
    uploader,
    waits,
)
from upweight.rollout.models import SampleGroup

from . import helpers
from .test_runner import assert_adds_up


@pytest.fixture(autouse=True)
def _quick_upload_retries(monkeypatch):
    monkeypatch.setattr(uploader, "FIRST_WAIT_S", 0.05)


@pytest.fixture(autouse=True)
def _nothing_is_left_over():
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 3
    left = []
    while time.monotonic() < deadline:
        left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("rollout-")]
        if set(left) <= {"rollout-worker"}:  # a rollout that still sleeps; it is abandoned
            return
        time.sleep(0.02)
    assert not left


# -- starting


def test_job_that_is_full_already_starts_nothing(server, make_runner):
    """Failure H3."""
    server.put_samples(0, 4)
    for n in (0, 1):
        dataset = helpers.Counting()
        summary = make_runner(dataset=dataset, num_batches=n).run()
        assert (summary.started, dataset.served) == (0, 0)
    assert {r.method for r in server.requests} == {"GET"}


def test_null_version_counts_as_not_ready(server, make_runner):
    """Failure H7."""
    server.version = None
    began = time.monotonic()
    with pytest.raises(JobInitializationTimeout, match="still null"):
        make_runner(job_init_timeout=1).run()
    assert 0.9 < time.monotonic() - began < 2.0


@pytest.mark.parametrize("status", [400, 401, 403, 422])
def test_a_refusal_ends_the_start_at_once(server, make_runner, status):
    """Failure W6."""
    server.fail("/status", status, {"detail": "no"}, times=99)
    with pytest.raises(JobInitializationTimeout) as caught:
        make_runner().run()
    assert isinstance(caught.value.__cause__, BadRequestError)
    assert len(server.requests) == 1


def test_start_timeout_is_wall_clock(server, make_runner):
    """Failure W6."""
    server.fail("/status", delay=30, times=99)
    began = time.monotonic()
    with pytest.raises(JobInitializationTimeout):
        make_runner(job_init_timeout=1).run()
    assert time.monotonic() - began < 2.0


def test_start_timeout_zero_is_one_try(server, make_runner):
    """Failure W6."""
    server.fail("/status", 503, times=99)
    with pytest.raises(JobInitializationTimeout):
        make_runner(job_init_timeout=0).run()
    assert len(server.requests) == 1


def test_server_errors_during_the_start_are_waited_out(server, make_runner):
    """Failure W6."""
    server.fail("/status", 404, times=3)
    server.fail("/status", 503, times=6)
    assert make_runner().run().accepted == 12


@pytest.mark.parametrize("tells", [True, False])
def test_batch_size_mismatch(server, make_runner, tells):
    """Failure X12."""
    server.tells_batch_size = tells
    server.batch_size = 6
    if not tells:
        server.put_samples(0, 5)
    dataset = helpers.Counting()
    with pytest.raises(BatchSizeMismatch, match="batch_size is 4 here"):
        make_runner(dataset=dataset).run()
    assert dataset.served == 0


def test_larger_client_batch_is_noticed_when_an_answer_says_filled(server, make_runner):
    """Failure X12."""
    with pytest.raises(BatchSizeMismatch, match="batch_size is 8 here"):
        make_runner(batch_size=8).run()


@pytest.mark.parametrize("present", [0, 4])
def test_smaller_client_batch_is_noticed_when_its_batch_takes_more(server, make_runner, present):
    """Failure X12: a batch that never fills is never trained; the server does not tell its size."""
    server.batch_size = 8
    server.put_samples(0, present)
    dataset = helpers.Counting()
    with pytest.raises(BatchSizeMismatch, match="batch_size is 4 here but batch 0 on the server takes more than 4"):
        make_runner(dataset=dataset, allowed_staleness=1).run()
    assert server.sizes() == {0: 4}
    assert dataset.served == 0 or not present


@pytest.mark.parametrize("route", ["/status", "/batches/0"])
def test_a_refusal_without_a_time_limit_names_no_seconds(server, make_runner, route):
    """Failure W6."""
    server.fail(route, 403, {"detail": "not your job"}, times=10**6)
    with pytest.raises(JobInitializationTimeout) as caught:
        make_runner(job_init_timeout=None).run()
    assert str(caught.value) == "Rollout job 'job-1' did not become ready. Last polling error: not your job"
    assert caught.value.timeout_seconds is None


def test_effective_number_of_batches_is_the_smaller_one(server, make_runner, caplog):
    """Failure X8."""
    server.total_batches = 2
    assert make_runner(num_batches=None).run().batches_filled == 2
    assert "smaller one counts" not in caplog.text
    with FakeJobServer(total_batches=1) as other:
        make_runner(num_batches=3)._api_client._base_url = other.url
        assert make_runner(num_batches=3).run().batches_filled == 1
    assert "num_batches is 3 here but the job takes 1" in caplog.text


# -- resuming


@pytest.mark.parametrize(
    ("B", "G", "S", "N", "present"), [(8, 2, 1, 6, 6), (4, 2, 0, 3, 3), (6, 3, -1, 3, 1), (4, 4, 0, 2, 2)]
)
@pytest.mark.parametrize("drop", [False, True])
def test_resumption_fills_exactly(server, make_runner, B, G, S, N, present, drop):
    """Failures H4, X1, W2."""
    server.batch_size = B
    server.put_samples(0, present)
    settings = {"num_samples_per_task": G, "allowed_staleness": S, "num_batches": N, "drop_stale_trajectories": drop}
    summary = make_runner(helpers.slow_rollout, batch_size=B, max_concurrency=2 * G, **settings).run()
    assert server.sizes() == dict.fromkeys(range(N), B)
    assert server.worst_staleness() <= S
    assert_adds_up(summary)
    if not drop and S >= 0:
        assert summary.started == -(-(N * B - present) // G)


# -- rollouts


def test_a_run_that_accepts_nothing_stalls(server, make_runner):
    """Failure H1."""

    def reject(task, context):
        time.sleep(0.01)
        return SampleGroup(is_rejected=True)

    with pytest.raises(RolloutStalled, match=r"\d+ rejected, 0 failed, 0 dropped, 0 timed out"):
        make_runner(reject, no_progress_timeout=0.5).run()


@pytest.mark.parametrize("result", [None, SampleGroup(), SampleGroup(samples=[helpers.good_sample()] * 2)])
def test_wrong_results_are_failed_rollouts(server, make_runner, result):
    """Failure X4."""
    with pytest.raises(RolloutValidationError, match="expected"):
        make_runner(lambda task, context: result, raise_on_rollout_failure=True).run()
    first = iter([result])
    runner = make_runner(lambda task, context: next(first, helpers.rollout(task, context)), num_rollout_retries=1)
    assert runner.run().retries == 1


def test_raising_uploads_what_is_ready_first(server, make_runner):
    """Failures X1, H10: ready samples are sent before an error leaves."""

    def fails_later(task, context):
        if task == 6:
            time.sleep(0.2)
            raise KeyError("seven")
        return helpers.rollout(task, context)

    with pytest.raises(KeyError, match="seven"):
        make_runner(fails_later, raise_on_rollout_failure=True, max_concurrency=1).run()
    assert server.sizes() == {0: 4, 1: 2}


def test_a_hanging_rollout_is_given_up(server, make_runner):
    """Failure H14 and report H8: the place is used again, a late result ignored."""
    summary = make_runner(helpers.hanging_rollout, rollout_timeout=0.3).run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert summary.timed_out == 1
    assert_adds_up(summary)


def test_versions_reported_by_the_samples_win(server, make_runner):
    """Failure D8."""

    def reports(task, context):
        return SampleGroup(samples=[helpers.good_sample(debug_info={"token_inference_versions": [1, 0]})])

    server.put_samples(0, 4)
    make_runner(reports, num_batches=2).run()
    assert {s["debug_info"].get("starting_inference_version", 0) for s in server.samples()} == {0}


def test_an_unpicklable_rollout_is_reported_before_anything_starts(server, make_runner):
    """Failure H13."""
    dataset = helpers.Counting()
    with pytest.raises(TypeError, match="rollout function"):
        make_runner(lambda task, context: None, dataset=dataset, executor_type="process").run()
    assert (dataset.served, server.requests) == (0, [])


def test_drop_stale_starts_nothing_that_could_not_be_used(server, make_runner):
    """Failure W1."""
    server.trains = False
    dataset = helpers.Counting()
    runner = make_runner(dataset=dataset, num_batches=None, drop_stale_trajectories=True, allowed_staleness=1)
    threading.Timer(0.8, runner.stop).start()
    summary = runner.run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}  # batch 2 is the last one that version 0 may enter
    assert summary.started <= 12 + 4
    assert_adds_up(summary)


# -- data


def test_dataset_errors_leave_after_the_work_in_flight(server, make_runner):
    """Failure X7."""

    class Breaks(helpers.Counting):
        def sample(self, n):
            if self.served:
                raise OSError("disk gone")
            return super().sample(min(n, 3))

    with pytest.raises(OSError, match="disk gone"):
        make_runner(helpers.slow_rollout, dataset=Breaks()).run()
    assert server.sizes() == {0: 3}


def test_the_end_of_the_data(server, make_runner):
    """Failure H9 and report H3."""
    with pytest.raises(DatasetExhausted) as caught:
        make_runner(helpers.slow_rollout, dataset=helpers.Counting(7)).run()
    assert (caught.value.filled, caught.value.needed, caught.value.open_samples) == (1, 3, 3)
    summary = make_runner(dataset=helpers.Counting(2), num_batches=None).run()
    assert (summary.accepted, summary.reason) == (2, "the dataset ended")
    assert server.sizes() == {0: 4, 1: 4, 2: 1}


def test_a_slow_dataset_delays_nothing_else(server, make_runner):
    """Failure W10."""

    class Slow(helpers.Counting):
        def sample(self, n):
            if self.served:
                time.sleep(0.5)
            return super().sample(n)

    runner = make_runner(dataset=Slow(), max_concurrency=4)
    threading.Thread(target=runner.run, daemon=True).start()
    time.sleep(0.4)
    assert server.sizes() == {0: 4}
    runner.stop()
    time.sleep(0.6)


# -- the job


def test_version_rollback(server, make_runner, caplog):
    """Failure X3."""

    def rollout(task, context):
        if task == 9:
            server.trains = False
            server.version = 0
            time.sleep(0.2)
            server.trains = True
            server.version = server.filled
        return helpers.slow_rollout(task, context)

    make_runner(rollout, allowed_staleness=0).run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert server.worst_staleness() <= 0
    assert re.search("went back from [12] to 0", caplog.text)


def test_a_job_that_vanishes(server, make_runner):
    """Failure H8."""

    def rollout(task, context):
        if task == 2:
            server.faults.append(Fault("/status", Reply(404, {"detail": "gone"}), times=10**6))
        return helpers.rollout(task, context)

    with pytest.raises(JobUnavailable, match="gone") as caught:
        make_runner(rollout, status_failure_timeout=0.3, num_batches=None).run()
    assert caught.value.__cause__ is not None
    assert server.samples()


@pytest.mark.parametrize("state", ["failed", "succeeded"])
def test_a_job_that_ends(server, make_runner, state):
    """Failure H8."""

    def rollout(task, context):
        if task == 2:
            server.status_extra = {"job_status": state, "error": {"message": "boom"}}
        return helpers.rollout(task, context)

    runner = make_runner(rollout, num_batches=None)
    if state == "failed":
        with pytest.raises(JobUnavailable, match="boom"):
            runner.run()
    else:
        assert runner.run().reason == "the job succeeded"


# -- uploads


def test_a_stored_upload_whose_answer_is_lost_is_not_doubled(server, make_runner):
    """Failure D1."""
    server.fail("/samples", 502, times=3, stored=True)
    make_runner().run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert max(calls_by_key(server).values()) > 1


def test_uploads_are_tried_on_while_rollouts_go_on(server, make_runner):
    """Failure X10."""
    server.fail("/samples", 500, times=9)
    summary = make_runner().run()
    assert (summary.batches_filled, summary.unsent_samples) == (3, 0)


def test_upload_failure_hands_back_the_samples_and_the_spool_sends_them_later(server, make_runner, tmp_path):
    """Failures X10, D1."""
    server.fail("/samples", 500, times=10**6)
    with pytest.raises(UploadFailed, match="unsent") as caught:
        make_runner(upload_timeout=0.3, spool_dir=tmp_path, num_batches=2).run()
    assert isinstance(caught.value.__cause__, InternalServerError)
    unsent = [sample.id for sample in caught.value.samples]
    assert len(unsent) >= 4
    server.faults.clear()
    # One was stored although its answer was lost.
    server.batches[0].append({"id": unsent[0], "debug_info": {}})
    server.ids.add(unsent[0])
    make_runner(spool_dir=tmp_path, num_batches=2).run()
    assert server.sizes() == {0: 4, 1: 4}
    assert set(unsent) <= server.ids
    assert not list(tmp_path.glob("**/*.jsonl"))


def test_a_refused_upload_ends_the_run_at_once(server, make_runner):
    server.fail("/samples", 422, {"detail": "bad sample"}, times=10**6)
    with pytest.raises(UploadFailed, match="bad sample"):
        make_runner().run()
    assert server.count("POST", "/samples") == 1


def test_ready_samples_travel_together(server, make_runner):
    """Failure W9."""
    server.batch_size = 32
    server.faults.append(Fault("/samples", delay=0.3))
    make_runner(batch_size=32, num_batches=2, max_concurrency=8).run()
    assert server.sizes() == {0: 32, 1: 32}
    assert server.count("POST", "/samples") <= 12


def test_a_slow_upload_does_not_delay_rollouts(server, make_runner):
    """Failure W10."""
    server.faults.append(Fault("/samples", delay=1.0))
    dataset = helpers.Counting()
    runner = make_runner(dataset=dataset, num_batches=None)
    thread = threading.Thread(target=runner.run)
    thread.start()
    time.sleep(0.7)
    assert dataset.served >= 8
    runner.stop()
    thread.join(5)


def test_two_runners_on_one_job(server, make_runner):
    """Failure D5."""
    runners = [make_runner(helpers.slow_rollout, num_batches=4, allowed_staleness=1) for _ in range(2)]
    summaries = []
    threads = [threading.Thread(target=lambda r=r: summaries.append(r.run())) for r in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert server.sizes() == {0: 4, 1: 4, 2: 4, 3: 4}
    assert server.worst_staleness() <= 1
    assert len(summaries) == 2
    for summary in summaries:
        assert_adds_up(summary)


# -- ending and waiting


def test_stop_is_prompt_and_sends_what_is_ready(server, make_runner):
    """Failure W3."""

    def slow_after_three(task, context):
        if task >= 3:
            time.sleep(3)
        return helpers.rollout(task, context)

    runner = make_runner(slow_after_three)
    threading.Timer(0.4, runner.stop).start()
    began = time.monotonic()
    summary = runner.run()
    assert time.monotonic() - began < 1.5
    assert (summary.reason, summary.accepted) == ("stopped", 3)
    assert summary.unfinished == summary.started - 3
    assert server.sizes() == {0: 3}


def test_progress_and_the_cause_of_waiting(server, make_runner, caplog, monkeypatch):
    """Report H11: a heartbeat that names the cause."""
    monkeypatch.setattr(waits, "WARN_EVERY_S", 0.2)
    server.trains = False
    runner = make_runner(num_batches=5)
    assert runner.progress() is None
    thread = threading.Thread(target=runner.run)
    with caplog.at_level(logging.WARNING):
        thread.start()
        time.sleep(0.9)
    progress = runner.progress()
    assert (progress.batches_filled, progress.in_flight, progress.inference_version) == (2, 0, 0)
    assert progress.counts.accepted == 8
    assert progress.waiting_for == "a version above 0 (batch 2 has 4 free places)"
    warnings = [r.message for r in caplog.records if "No progress" in r.message]
    assert 2 <= len(warnings) <= 5
    assert "a version above 0" in warnings[0]
    runner.stop()
    thread.join(3)


def test_a_run_that_only_rejects_says_so(make_runner, caplog, monkeypatch):
    """Groups end all the time, so something happens; that none of them is accepted is still worth a line."""
    monkeypatch.setattr(waits, "WARN_EVERY_S", 0.2)

    def reject(task, context):
        time.sleep(0.02)
        return SampleGroup(is_rejected=True)

    runner = make_runner(reject)
    threading.Timer(0.7, runner.stop).start()
    with caplog.at_level(logging.WARNING):
        runner.run()
    lines = [r.getMessage() for r in caplog.records if "No sample was accepted" in r.getMessage()]
    assert 1 <= len(lines) <= 4
    assert re.search(r"for \d s, though rollouts end: \d+ rejected, 0 failed, .* of \d+ started", lines[0])


SCRIPT = textwrap.dedent("""
    import sys, time
    from upweight.api_client import TokenFactory
    from upweight.rollout import RolloutConfig, RolloutRunner

    def hang(task, context):
        time.sleep(60)

    class Data:
        def sample(self, n):
            return [0] * n

    config = RolloutConfig(job_id="job-1", model_name="m", batch_size=4, num_samples_per_task=1,
                           executor_type=sys.argv[2], shutdown_timeout=1)
    if __name__ == "__main__":
        print("running", flush=True)
        print(RolloutRunner(TokenFactory(sys.argv[1], "k"), config, hang, Data()).run().reason, flush=True)
""")


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_cleanly_whatever_rollouts_do(server, tmp_path, executor, number):
    """Failures H10, W3."""
    script = tmp_path / "hang.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script), server.url, executor], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "running\n"
    end = time.monotonic() + 60
    while server.count("GET", "/status") < 2:  # it runs
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(process.pid, number)
    out, _ = process.communicate(timeout=10)
    assert time.monotonic() - began < 5
    assert (process.returncode, out) == (0, f"stopped by {number.name}\n")
