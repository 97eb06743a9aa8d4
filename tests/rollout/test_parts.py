"""Dispatcher, tracker, feeder and validation on their own."""

import asyncio
import itertools
import math
import threading
import time
from queue import Queue
from types import SimpleNamespace

import pytest

from upweight.rollout import ExecutorType
from upweight.rollout.dataset import CyclingDataset
from upweight.rollout.exceptions import RolloutTimeout, RolloutValidationError, WorkerPoolBroken
from upweight.rollout.feeder import DatasetFeeder
from upweight.rollout.messages import Broken, DatasetFailed, JobEnded, TasksDrawn
from upweight.rollout.models import JobStatusUpdate, RolloutException, RolloutResult, SampleGroup, Task
from upweight.rollout.runner import JobStatusTracker, RolloutDispatcher
from upweight.rollout.validation import encode_group

from . import helpers

CONTEXT = SimpleNamespace(config=SimpleNamespace(num_samples_per_task=1))


class Bench:
    """A running dispatcher and its queues."""

    def __init__(self, fn, workers=2, retries=0, raises=False, **kw):
        self.tasks, self.results = Queue(), Queue()
        self.dispatcher = RolloutDispatcher(fn, CONTEXT, self.tasks, self.results, workers, retries, raises, **kw)

    def __enter__(self):
        self.dispatcher.start()
        return self

    def __exit__(self, *exc):
        self.dispatcher.stop()
        self.dispatcher.join(5)
        assert not self.dispatcher.is_alive()

    def send(self, *specs):
        for spec in specs:
            self.tasks.put(Task(spec=spec, starting_inference_version=0))

    def get(self, timeout=10):
        return self.results.get(timeout=timeout)


def test_dispatcher_hands_over_the_very_object():
    group = SampleGroup(samples=[])
    with Bench(lambda task, context: group) as bench:
        task = Task(spec=1, starting_inference_version=0)
        bench.tasks.put(task)
        result = bench.get()
        assert isinstance(result, RolloutResult)
        assert result.sample_group is group
        assert result.task is task


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()])
def test_dispatcher_retries_then_rejects_or_raises(error):
    """Failure H10."""
    calls = itertools.count()

    def failing(task, context):
        next(calls)
        raise error

    with Bench(failing, retries=2) as bench:
        bench.send(1)
        result = bench.get()
        assert result.sample_group.is_rejected
        assert result.error is error
        assert (next(calls), result.retries) == (3, 2)
        bench.send(2)
        assert bench.get().error is error
    with Bench(failing, raises=True) as bench:
        bench.send(1)
        result = bench.get()
        assert isinstance(result, RolloutException)
        assert result.exception is error
        assert "failing" in result.traceback


def test_retry_waits_without_occupying_a_worker_and_is_stamped_anew():
    """Failures W8, D8."""
    versions = iter([5, 6, 7])
    first = []

    def once(task, context):
        if task == "a" and not first:
            first.append(task)
            raise ValueError
        return SampleGroup()

    with Bench(once, workers=1, retries=1, retry_backoff=0.3, current_version=lambda: next(versions)) as bench:
        began = time.monotonic()
        bench.send("a", "b")
        b, a = bench.get(), bench.get()
        assert (b.task.spec, b.starting_inference_version) == ("b", 6)
        assert (a.task.spec, a.starting_inference_version) == ("a", 7)
        assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_time_limit_frees_the_place(executor):
    """Failure H14."""
    kw = {"rollout_timeout": 2.0 if executor == "process" else 0.3, "executor_type": ExecutorType(executor)}
    with Bench(helpers.hanging_rollout, workers=1, **kw) as bench:
        bench.send(0, 1, 2)
        results = [bench.get() for _ in range(3)]
        assert isinstance(results[0].error, RolloutTimeout)
        assert [r.error for r in results[1:]] == [None, None]


def test_a_dead_worker_process_is_replaced():
    """Failure H11."""
    with Bench(helpers.dying_rollout, workers=1, executor_type=ExecutorType.PROCESS) as bench:
        bench.send(0, 1, 2)
        results = [bench.get() for _ in range(3)]
        assert [r.error is None for r in results] == [True, False, True]
        assert "exit code 7" in str(results[1].error)


def test_a_pool_that_keeps_dying_is_broken():
    """Failure H11."""
    with Bench(helpers.always_dying_rollout, workers=1, executor_type=ExecutorType.PROCESS, max_pool_restarts=1) as b:
        b.send(0, 1)
        b.get()
        broken = b.get()
        assert isinstance(broken, Broken)
        assert isinstance(broken.exception, WorkerPoolBroken)
        assert "[7, 7]" in str(broken.exception)


def test_process_workers_keep_their_context():
    """Failure W11."""
    with Bench(helpers.pid_rollout, workers=1, executor_type=ExecutorType.PROCESS) as bench:
        bench.send(1, 2)
        infos = [bench.get().sample_group.samples[0].debug_info for _ in range(2)]
        assert infos[0] == infos[1]


def test_unpicklable_rollout_function():
    """Failure H13."""
    with pytest.raises(TypeError, match=r"rollout function .*lambda"):
        RolloutDispatcher(lambda: 1, CONTEXT, Queue(), Queue(), 1, 0, False, executor_type=ExecutorType.PROCESS)


# -- tracker


def test_tracker_forwards_changes_only(server, api):
    """Failure W7."""
    server.version = None
    news = Queue()
    tracker = JobStatusTracker("job-1", api, news, 0)
    tracker.start()
    time.sleep(0.15)
    assert news.empty()
    assert server.count("GET", "/status") <= 16
    server.version = 3
    assert news.get(timeout=2) == JobStatusUpdate(inference_version=3)
    server.version = 2
    assert news.get(timeout=2) == JobStatusUpdate(inference_version=2)
    time.sleep(0.05)
    assert news.empty()
    tracker.stop()
    tracker.join(2)
    assert not tracker.is_alive()


def test_tracker_reports_a_lost_job_once(server, api, caplog):
    """Failure H8."""
    server.fail("/status", 500, times=10**6)
    news = Queue()
    tracker = JobStatusTracker("job-1", api, news, 0.02, failure_timeout=0.3)
    tracker.start()
    ended = news.get(timeout=5)
    assert isinstance(ended, JobEnded)
    assert "Status code: 500" in str(ended.error.__cause__)
    assert sum("status poll failed" in r.message for r in caplog.records) == 1
    tracker.join(2)


@pytest.mark.parametrize(("state", "failed"), [("failed", True), ("cancelled", True), ("succeeded", False)])
def test_tracker_sees_terminal_states(server, api, state, failed):
    """Failure H8."""
    server.status_extra = {"job_status": state, "error": {"message": "out of memory"}}
    news = Queue()
    tracker = JobStatusTracker("job-1", api, news, 0.02)
    tracker.start()
    assert news.get(timeout=2) == JobStatusUpdate(inference_version=0)
    ended = news.get(timeout=2)
    assert (ended.error is not None) is failed
    if failed:
        assert "out of memory" in str(ended.error)
    tracker.join(2)


# -- feeder


def feed(dataset, *requests):
    news = Queue()
    feeder = DatasetFeeder(dataset, news)
    feeder.start()
    answers = []
    for n in requests:
        feeder.request(n)
        answers.append(news.get(timeout=2))
    feeder.stop()
    feeder.join(2)
    return answers


def test_feeder_keeps_a_surplus_and_knows_the_end():
    """Failures X7, H9."""

    class Generous:
        calls = 0

        def sample(self, n):
            self.calls += 1
            return (f"{self.calls}.{i}" for i in range(3)) if self.calls < 3 else []

    assert feed(Generous(), 2, 2, 3, 1) == [
        TasksDrawn(["1.0", "1.1"]),
        TasksDrawn(["1.2"]),
        TasksDrawn(["2.0", "2.1", "2.2"]),
        TasksDrawn([], ended=True),
    ]


def test_feeder_reports_errors():
    """Failure X7."""

    class Bad:
        def sample(self, n):
            raise OSError("disk")

    (failed,) = feed(Bad(), 1)
    assert isinstance(failed, DatasetFailed)


def test_cycling_dataset():
    cycle = CyclingDataset("ab")
    assert cycle.sample(3) == ["a", "b", "a"]
    assert cycle.sample(2) == ["b", "a"]
    with pytest.raises(ValueError, match="empty"):
        CyclingDataset([])


# -- validation


@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        ({"token_ids": [1]}, "lengths", "lengths differ"),
        ({"token_ids": [], "logprobs": [], "mask": []}, "empty", "token_ids is empty"),
        ({"token_ids": [1, 2, -3]}, "negative_id", "-3"),
        ({"token_ids": [1, 2, "x"]}, "wrong_type", "token_ids"),
        ({"mask": [0, 1, 2]}, "mask", "only 0 and 1"),
        ({"mask": [0, 0, 0]}, "no trainable token", "no trainable token"),
        ({"logprobs": [0.0, math.nan, 0.0]}, "non_finite", "sample 0: logprobs"),
        ({"normalized_reward": math.inf}, "non_finite", "normalized_reward"),
        ({"metadata": {"k": 1}}, "metadata", "metadata\\['k'\\]"),
        ({"debug_info": {"lock": threading.Lock()}}, "debug_info", "debug_info\\['lock'\\]"),
        ({"debug_info": {"x": {1}}}, "debug_info", "debug_info\\['x'\\]"),
        ({"debug_info": {"x": math.nan}}, "debug_info", "debug_info\\['x'\\]"),
    ],
)
def test_bad_samples(change, reason, text):
    """Failures X5, X6, D6 and reports M6, E4."""
    group = SampleGroup(samples=[helpers.good_sample(**change)])
    with pytest.raises(RolloutValidationError, match=text) as caught:
        encode_group("task-1", group, 1)
    assert caught.value.reason == reason
    assert "task-1" in str(caught.value)


@pytest.mark.parametrize("group", [None, 3, SampleGroup(), SampleGroup(samples=[helpers.good_sample()] * 3)])
def test_bad_groups(group):
    """Failure X4."""
    with pytest.raises(RolloutValidationError, match=r"task-1.*expected.*got"):
        encode_group("task-1", group, 2)


def test_wire_samples():
    """Failure X6: None counts as {}."""
    sample = helpers.good_sample(metadata=None, debug_info=None)
    assert encode_group("t", SampleGroup(is_rejected=True), 1) == []
    (encoded,) = encode_group("t", SampleGroup(samples=[sample]), 1)
    wire = encoded.stamp("t", 4).to_wire()
    assert (wire.metadata, wire.debug_info) == ({}, {"starting_inference_version": 4, "task_id": "t"})


def test_reported_version_is_the_smallest_one():
    """Failure D8."""
    infos = [{"inference_version": 4}, {"inference_version": 5, "token_inference_versions": [3, 4]}, None]
    group = SampleGroup(samples=[helpers.good_sample(debug_info=info) for info in infos])
    assert [sample.reported for sample in encode_group("t", group, 3)] == [4, 3, None]
    (silent,) = encode_group("t", SampleGroup(samples=[helpers.good_sample()]), 1)
    assert silent.reported is None


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "mask"])
@pytest.mark.parametrize("bad", [2**40, -1, 0.5, float("nan"), "1", None])
def test_one_bad_number_among_many_is_found(field: str, bad: object) -> None:
    """Whatever passes the check can be turned into a wire sample; whatever cannot is refused with the field's name."""
    sample = helpers.good_sample(token_ids=[1] * 50, logprobs=[-0.5] * 50, mask=[1] * 50)
    getattr(sample, field)[17] = bad
    fine = field == "logprobs" and bad in (2**40, -1, 0.5)
    if fine:
        (encoded,) = encode_group("t", SampleGroup(samples=[sample]), 1)
        assert encoded.stamp("t", 0).to_wire().logprobs[17] == bad
    else:
        with pytest.raises(RolloutValidationError, match=field):
            encode_group("t", SampleGroup(samples=[sample]), 1)


def test_scalars_of_other_libraries_become_plain_numbers() -> None:
    np = pytest.importorskip("numpy")
    sample = helpers.good_sample(
        token_ids=np.array([1, 2]),
        logprobs=np.array([0, -0.5], np.float32),
        mask=np.array([0, 1]),
        normalized_reward=np.float32(1),
    )
    (encoded,) = encode_group("t", SampleGroup(samples=[sample]), 1)
    wire = encoded.stamp("t", 3).to_wire()
    assert [(type(v), v) for v in (*wire.token_ids, *wire.mask, *wire.logprobs, wire.normalized_reward)] == [
        (int, 1),
        (int, 2),
        (int, 0),
        (int, 1),
        (float, 0.0),
        (float, -0.5),
        (float, 1.0),
    ]
