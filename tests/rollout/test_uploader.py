"""The uploader on its own: who owns which place when answers are lost and others fill the job too."""

import time
from queue import Empty, Queue

import httpx
import pytest
import tenacity

from tests.fakes import Fault, calls_by_key
from upweight.api_client import TokenFactory
from upweight.rollout import RolloutRunner, uploader
from upweight.rollout.exceptions import UploadFailed
from upweight.rollout.messages import Broken, PlacesTaken, Uploaded
from upweight.rollout.models import SampleGroup
from upweight.rollout.spool import Spool
from upweight.rollout.uploader import Uploader, UploadPlan
from upweight.rollout.validation import encode_group

from . import helpers


@pytest.fixture
def upload(server, api, monkeypatch):
    monkeypatch.setattr(uploader, "FIRST_WAIT_S", 0.05)
    started = []

    def start(**changes):
        plan = UploadPlan(
            **{"job_id": "job-1", "batch_size": 4, "num_batches": None, "staleness": 0, "timeout": 5, **changes}
        )
        api.v1alpha1.fine_tuning.jobs.batches.create(job_id="job-1", index=0)
        started.append(Uploader(api, plan, 0, Queue(), Spool(None, "job-1"), opened=0))
        started[-1].start()
        return started[-1]

    yield start
    for thread in started:
        thread.stop()
        thread.join(3)
        assert not thread.is_alive()


def wire(n, version=0):
    group = SampleGroup(samples=[helpers.good_sample() for _ in range(n)])
    return [sample.stamp("t", version) for sample in encode_group("t", group, n)]


def settle(thread):
    deadline = time.monotonic() + 5
    while thread.backlog and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    news = []
    try:
        while True:
            news.append(thread._output.get_nowait())
    except Empty:
        return news


def shifts(news):
    return sum(m.n_places for m in news if isinstance(m, PlacesTaken))


def test_batches_are_opened_one_ahead_but_none_after_the_last(server, upload):
    thread = upload(num_batches=2)
    thread.put(wire(6))
    assert settle(thread)[-1] == Uploaded(1, 2)
    thread.put(wire(2, version=1))
    settle(thread)
    assert server.sizes() == {0: 4, 1: 4}
    assert sorted(server.batches) == [0, 1]
    assert thread.staleness == {-1: 4 + 2, 0: 2}


def test_places_of_others_move_ours_and_drop_what_became_too_stale(server, upload):
    """Failure D5."""
    server.faults = []
    thread = upload()
    server.put_samples(0, 4)
    server.put_samples(1, 2)
    thread.put(wire(3))
    news = settle(thread)
    assert server.sizes() == {0: 4, 1: 4}
    assert [m for m in news if isinstance(m, PlacesTaken)] == [PlacesTaken(5, 1)]


def test_a_stored_upload_without_answer_is_not_taken_for_somebody_elses(server, upload):
    """Failures D1, D5."""
    server.fail("/samples", 502, times=4, stored=True)
    thread = upload()
    first, rest = wire(1), wire(2)
    thread.put(first)
    while not server.ids:
        time.sleep(0.005)
    server.put_samples(0, 2)
    thread.put(rest)
    news = settle(thread)
    assert server.sizes() == {0: 4, 1: 1}
    assert {s.id for s in [*first, *rest]} <= server.ids
    assert shifts(news) == 2
    assert thread.position == 5


def test_what_is_accepted_too_late_is_dropped(server, upload):
    thread = upload()
    server.put_samples(0, 4)
    server.put_samples(1, 3)
    thread.put(wire(1))
    settle(thread)
    thread.put(wire(2))  # the scheduler does not know yet that batch 2 is being filled
    news = settle(thread)
    assert server.worst_staleness() == 0
    assert PlacesTaken(-2, 2) in news
    assert thread.position == 8


def test_a_larger_count_moves_ours_up(server, upload):
    """Failure D1."""
    thread = upload()
    server.put_samples(0, 1)
    thread.put(wire(2))
    news = settle(thread)
    assert shifts(news) == 1
    assert thread.position == 3


def test_a_batch_that_vanished_is_opened_again(server, upload):
    thread = upload()
    del server.batches[0]
    thread.put(wire(2))
    assert settle(thread)[-1] == Uploaded(0, 2)


def test_a_bug_in_the_thread_is_told(server, upload):
    thread = upload()
    thread.put([wire(1)[0]._replace(version=None)])
    assert isinstance(thread._output.get(timeout=3), Broken)


@pytest.mark.parametrize("limits", [{"upload_timeout": 0}, {"status_failure_timeout": 0}])
def test_a_limit_of_failing_is_none_of_answers_that_take_their_time(server, make_runner, limits):
    """Failures X10, H8: with a short limit each request had to be answered within it, or within 50 ms."""
    server.faults += [Fault("/samples", delay=0.15, times=2), Fault("/status", delay=0.15, times=9)]
    assert make_runner(num_batches=2, **limits).run().batches_filled == 2


def test_without_time_for_failures_the_first_one_ends_the_run(server, make_runner):
    """Failure X10."""
    server.fail("/samples", 500, times=10**6)
    with pytest.raises(UploadFailed, match="unsent after 0 s"):
        make_runner(upload_timeout=0, shutdown_timeout=0.2).run()
    assert server.count("POST", "/samples") == 1


def test_failing_uploads_are_tried_again_after_growing_waits(server, upload, caplog):
    """Failure X10; what the client itself does not repeat, so that only these waits are seen."""
    server.fail("/samples", 302, times=4)
    thread = upload(batch_size=4)
    thread.put(wire(4))
    assert settle(thread)
    waits = [float(r.message.split("next try in ")[1].split()[0]) for r in caplog.records if "next try" in r.message]
    assert len(waits) == 4
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(0.4)
    assert server.sizes() == {0: 4}


def test_an_upload_may_take_longer_than_other_calls(server):
    """Failure X10: inside a run uploads had the 5 s of other calls, so that one which takes longer could never end."""
    server.faults.append(Fault("/samples", delay=0.6, times=10**6))
    short = tenacity.wait_fixed(0.02)
    with TokenFactory(
        server.url, "k", tenacity_retry_wait=short, httpx_client_factory=lambda: httpx.Client(timeout=0.2)
    ) as api:
        settings = helpers.config(num_batches=1, upload_timeout=3)
        summary = RolloutRunner(api, settings, helpers.rollout, helpers.Counting()).run()
    assert (summary.batches_filled, max(calls_by_key(server).values())) == (1, 1)
