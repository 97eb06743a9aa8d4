"""Rollout functions, datasets and disks that misbehave: one rollout is lost, or one clear line ends the run; never a hang."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from upweight.errors import RolloutError
from upweight.rollout import DatasetExhausted, RolloutRunner, tasks
from upweight.rollout.datasets import SequenceDataset
from upweight.rollout.exceptions import reason_of
from upweight.rollout.group_log import read_groups
from upweight.rollout.models import Sample, SampleGroup

from . import helpers, hostile_errors

ALWAYS_THE_SAME = helpers.good_sample()


@pytest.mark.parametrize("size", [1, 2])
def test_sample_objects_returned_again_and_again_are_new_samples(
    server: Any, make_runner: Any, caplog: Any, size: int
) -> None:
    """The server takes a known id for a repetition: such samples would be lost and the batch never fill."""

    def rollout(task: int, context: Any) -> SampleGroup:
        return SampleGroup(samples=[ALWAYS_THE_SAME] * size)

    make_runner(rollout, num_samples_per_task=size).run()
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert len({sample["id"] for sample in server.samples()}) == 12
    assert sum("was returned again" in r.getMessage() for r in caplog.records) == 1


def test_changing_a_sample_after_its_return_changes_nothing(server: Any, make_runner: Any) -> None:
    kept: list[Sample] = []

    def rollout(task: int, context: Any) -> SampleGroup:
        for sample in kept:
            sample.token_ids.append(-1)
            sample.logprobs.clear()
        kept.append(helpers.good_sample(token_ids=[1, 2, 3]))
        return SampleGroup(samples=kept[-1:])

    make_runner(rollout, max_concurrency=1).run()
    assert all(sample["token_ids"] == [1, 2, 3] for sample in server.samples())


def test_changing_the_config_inside_a_rollout_changes_nothing(server: Any, make_runner: Any) -> None:
    def rollout(task: int, context: Any) -> SampleGroup:
        group = SampleGroup(samples=[helpers.good_sample()])
        context.config.batch_size = 3
        context.config.num_samples_per_task = 7
        context.config.job_id = "another"
        return group

    assert make_runner(rollout).run().batches_filled == 3
    assert server.sizes() == {0: 4, 1: 4, 2: 4}


def test_closing_the_shared_client_inside_a_rollout_is_no_harm(server: Any, make_runner: Any) -> None:
    def rollout(task: int, context: Any) -> SampleGroup:
        with context.openai_client as client:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        return helpers.rollout(task, context)

    summary = make_runner(rollout, max_concurrency=1).run()
    assert (summary.batches_filled, summary.failed) == (3, 0)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")

    __repr__ = __str__


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("not even this")


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_exceptions_and_tasks_that_cannot_be_shown(
    server: Any, make_runner: Any, tmp_path: Path, executor: str
) -> None:
    tasks = [Unspeakable() for _ in range(14)]
    file = tmp_path / "groups.jsonl"
    dataset = SequenceDataset(tasks)
    summary = make_runner(
        raise_the_unspeakable, dataset=dataset, executor_type=executor, group_log=file, max_concurrency=1
    ).run()
    assert (summary.batches_filled, summary.errors) == (3, {"UnspeakableError": summary.failed})
    groups = list(read_groups(file))
    assert {group["task"] for group in groups} == {"<Unspeakable>"}
    assert any("cannot be shown" in (group["error"] or "") for group in groups)


_calls = iter(range(10**6))


def raise_the_unspeakable(task: Any, context: Any) -> SampleGroup:
    if next(_calls) % 14 == 1:
        raise UnspeakableError
    return helpers.rollout(0, context)


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


@pytest.mark.parametrize("mode", ["thread", "async", "process"])
def test_exceptions_that_leave_when_looked_at(server: Any, make_runner: Any, mode: str) -> None:
    """Failure H10: `sys.exit()` in `__str__`, `__reduce__` or `__getattribute__` costs that rollout, whoever looks at it."""
    function = hostile_errors.rollout_async if mode == "async" else hostile_errors.rollout
    executor = "process" if mode == "process" else "thread"
    summary = make_runner(function, executor_type=executor, num_batches=5, max_concurrency=1).run()
    assert (summary.batches_filled, summary.failed) == (5, len(hostile_errors.KINDS))
    assert summary.errors == {kind.__name__: 1 for kind in hostile_errors.KINDS}


@pytest.mark.parametrize("name", ["raise_attributes_leave", "raise_frozen"])
def test_what_cannot_be_raised_again_leaves_run_under_its_name(server: Any, make_runner: Any, name: str) -> None:
    kind = "AttributesLeave" if name == "raise_attributes_leave" else "Frozen"
    with pytest.raises(RolloutError, match=f"^{kind}") as caught:
        make_runner(getattr(hostile_errors, name), raise_on_rollout_failure=True).run()
    assert reason_of(caught.value) == kind
    assert name in [entry.name for entry in caught.traceback]


BAD_SAMPLES: dict[str, dict[str, Any]] = {
    "sample 0: token_ids is None, which has no length; give a list": {"token_ids": None},
    "sample 0: logprobs is None, which has no length; give a list": {"logprobs": None},
    "sample 0: mask is None, which has no length; give a list": {"mask": None},
    "sample 0: token_ids is of type int, which has no length": {"token_ids": 5},
    "sample 0: mask is of type generator, which has no length": {"mask": (1 for _ in range(3))},
    "sample 0: logprobs is a str; give a list": {"logprobs": "abc"},
    "sample 0: token_ids is a set; give a list": {"token_ids": {1, 2, 3}},
    "sample 0: token_ids: 'NoneType' object cannot be interpreted as an integer": {"token_ids": [None] * 3},
    "sample 0: normalized_reward: must be real number, not NoneType": {"normalized_reward": None},
    "sample 0: id None must be a text": {"id": None},
    "sample 0: token_ids holds 2147483648, which is no token id": {"token_ids": [1, 2**31, 3]},
    "sample 0: token_ids holds a negative id, -1": {"token_ids": [1, -1, 3]},
    "sample 0: logprobs is not finite in 32 bits: -1e+39": {"logprobs": [0.0, -1e39, -0.1]},
    "sample 0: normalized_reward is not finite in 32 bits: 1e+39": {"normalized_reward": 1e39},
    "sample 0: debug_info['a'] is nested deeper than 100 levels": {"debug_info": {"a": nested(200)}},
    "sample 0: id '' must be a text": {"id": ""},
}
BAD_RESULTS: dict[str, Any] = {
    "samples is of type generator, which has no length": SampleGroup(samples=(s for s in [helpers.good_sample()])),  # type: ignore[arg-type]
    "samples is None, which has no length; give a list": SampleGroup(samples=None),  # type: ignore[arg-type]
    "samples is of type Sample, which has no length": SampleGroup(samples=helpers.good_sample()),  # type: ignore[arg-type]
    "sample 0: expected a Sample, got NoneType": SampleGroup(samples=[None]),  # type: ignore[list-item]
    "expected a SampleGroup, got list": [helpers.good_sample()],
    "expected a SampleGroup, got Sample": helpers.good_sample(),
    "expected a SampleGroup, got function": asyncio.sleep,
    "expected a SampleGroup, got NoneType": None,
    **{line: SampleGroup(samples=[helpers.good_sample(**change)]) for line, change in BAD_SAMPLES.items()},
}


@pytest.mark.parametrize("line", BAD_RESULTS)
def test_results_of_any_shape_are_failed_rollouts(server: Any, make_runner: Any, caplog: Any, line: str) -> None:
    """Failure X4: whatever comes back, the log names sample and field, and another task takes the place before any upload."""
    first = threading.Event()

    def rollout(task: int, context: Any) -> Any:
        if not first.is_set():
            first.set()
            return BAD_RESULTS[line]
        return helpers.rollout(task, context)

    summary = make_runner(rollout, max_concurrency=1).run()
    assert (summary.batches_filled, summary.failed, sum(summary.errors.values())) == (3, 1, 1)
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert line in next(r.getMessage() for r in caplog.records if "failed after 1 attempts" in r.getMessage())


def test_an_async_rollout_that_blocks_its_loop_is_shown_and_stopped(server: Any, make_runner: Any) -> None:
    """`time.sleep` where `asyncio.sleep` was meant: nothing else can run, but the run still ends when told to."""

    async def blocking(task: int, context: Any) -> SampleGroup:
        threading.Event().wait(8)
        return helpers.rollout(task, context)

    runner = make_runner(blocking, shutdown_timeout=0.5)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(runner.run()))
    thread.start()
    deadline = time.monotonic() + 5
    while "in blocking" not in runner.report() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "in blocking" in runner.report()
    began = time.monotonic()
    runner.stop()
    thread.join(6)
    assert time.monotonic() - began < 4
    assert results[0].reason == "stopped"


def test_a_rollout_may_stop_its_own_run(server: Any, make_runner: Any) -> None:
    runner: Any = None

    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 5:
            runner.stop()
        return helpers.rollout(task, context)

    runner = make_runner(rollout, num_batches=None)
    assert runner.run().reason == "stopped"
    assert runner.progress().counts.accepted >= 1


def test_stop_before_run_starts_nothing(server: Any, make_runner: Any) -> None:
    dataset = helpers.Counting()
    runner = make_runner(dataset=dataset)
    runner.stop()
    assert runner.run().reason == "stopped"
    assert dataset.served == 0
    assert runner.run().batches_filled == 3


# -- datasets


def test_no_dataset_is_asked_for_everything_at_once(server: Any, make_runner: Any) -> None:
    asked: list[int] = []

    class Noting(helpers.Counting):
        def sample(self, n_samples: int) -> list[int]:
            asked.append(n_samples)
            return super().sample(min(n_samples, 8))

    make_runner(dataset=Noting(), max_concurrency=10**9, num_batches=3, allowed_staleness=None).run()
    server.batches.clear()
    server.ids.clear()
    runner = make_runner(dataset=Noting(), max_concurrency=10**9, num_batches=None, allowed_staleness=None)
    threading.Timer(0.3, runner.stop).start()
    runner.run()
    assert max(asked) == tasks.MAX_DRAW


def test_a_dataset_that_hangs_does_not_hold_the_end(server: Any, make_runner: Any) -> None:
    class Hanging(helpers.Counting):
        def sample(self, n_samples: int) -> list[int]:
            if self.served:
                threading.Event().wait(30)
            return super().sample(n_samples)

    runner = make_runner(dataset=Hanging(), max_concurrency=4, shutdown_timeout=0.5)
    threading.Timer(0.5, runner.stop).start()
    began = time.monotonic()
    assert runner.run().reason == "stopped"
    assert time.monotonic() - began < 3


def test_a_dataset_state_that_is_no_json_is_named(server: Any, make_runner: Any, tmp_path: Path) -> None:
    class Odd(helpers.Counting):
        def state(self) -> Any:
            return {1, 2}

        def restore(self, state: Any) -> None:
            pass

    with pytest.raises(TypeError, match=r"state of the dataset, \{1, 2\}, is no JSON"):
        make_runner(dataset=Odd(), spool_dir=tmp_path).run()


def test_tasks_that_do_not_travel_fail_with_a_reason(server: Any, make_runner: Any) -> None:
    dataset = SequenceDataset([threading.Lock(), threading.Lock()])
    with pytest.raises(DatasetExhausted, match=r"2 failed, errors: 2 × TypeError"):
        make_runner(dataset=dataset, executor_type="process", max_concurrency=1).run()


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), KeyboardInterrupt()])
def test_a_dataset_that_leaves_is_told(server: Any, make_runner: Any, error: BaseException) -> None:
    """Failure X7, for whatever it raises."""

    class Leaving(helpers.Counting):
        def sample(self, n_samples: int) -> list[int]:
            if self.served:
                raise error
            return super().sample(2)

    with pytest.raises(type(error)):
        make_runner(dataset=Leaving()).run()
    assert server.sizes() == {0: 2}


@pytest.mark.parametrize(
    "result", [None, {"score": "high"}, {"score": float("nan")}, {1: 1.0}, {"score": [1]}, {"score": 10**400}], ids=str
)
def test_scores_of_any_shape_end_no_run(server: Any, api: Any, caplog: Any, result: Any) -> None:
    def score(task: int, context: Any) -> Any:
        return result if task == 0 else {"score": 1}

    runner = RolloutRunner(
        api, helpers.config(), helpers.rollout, helpers.Counting(), eval_dataset=[0, 1], eval_fn=score
    )
    assert runner.run().evaluations == {0: {"score": 1.0}, 3: {"score": 1.0}}
    assert "gave no finite numbers by name" in caplog.text


# -- disks


def test_a_spool_that_vanishes_ends_no_run(server: Any, make_runner: Any, tmp_path: Path, caplog: Any) -> None:
    """Failure X10: the spool is a help, not a condition."""
    spool = tmp_path / "spool"

    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 3:
            shutil.rmtree(spool)
        return helpers.rollout(task, context)

    summary = make_runner(rollout, dataset=SequenceDataset(list(range(12))), spool_dir=spool, max_concurrency=1).run()
    assert summary.batches_filled == 3
    assert server.sizes() == {0: 4, 1: 4, 2: 4}
    assert sum("cannot be kept on disk" in r.getMessage() for r in caplog.records) == 1


def test_two_runs_with_one_spool_are_told(server: Any, api: Any, make_runner: Any, tmp_path: Path) -> None:
    """Running twice by mistake: the second one would send and delete what the first one has spooled."""
    first = make_runner(helpers.slow_rollout, num_batches=None, spool_dir=tmp_path)
    thread = threading.Thread(target=first.run)
    thread.start()
    while not server.samples():
        time.sleep(0.01)
    second = RolloutRunner(api, helpers.config(spool_dir=tmp_path), helpers.rollout, helpers.Counting())
    with pytest.raises(RolloutError, match=r"spool_dir: .* is used by another run"):
        second.run()
    first.stop()
    thread.join(5)
    assert second.run().reason in ("all batches are filled", "all batches were filled already")
