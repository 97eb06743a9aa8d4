"""Versions that rollouts report of their samples: taken only when they can be true."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from upweight.rollout import RolloutValidationError
from upweight.rollout.models import SampleGroup

from . import helpers


def reporting(info: dict[str, Any]) -> Any:
    def rollout(task: int, context: Any) -> SampleGroup:
        return SampleGroup(samples=[helpers.good_sample(), helpers.good_sample(debug_info=dict(info))])

    return rollout


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("inference_version", True, "True"),
        ("inference_version", -1, "-1"),
        ("inference_version", 1.0, "1.0"),
        ("inference_version", "0", "'0'"),
        ("inference_version", 10**6, "1000000; the newest version of this job is 0"),
        ("token_inference_versions", 0, "0; it must be a list"),
        ("token_inference_versions", [0, False], "False"),
        ("token_inference_versions", [0, 7], "7; the newest version of this job is 0"),
    ],
)
def test_a_version_that_cannot_be_true_is_the_groups_failure(
    server: Any, make_runner: Any, field: str, value: object, shown: str
) -> None:
    """Failure D8: with sample, field and value; nothing is uploaded."""
    with pytest.raises(RolloutValidationError, match=rf"sample 1: debug_info\['{field}'\] holds {shown}"):
        make_runner(reporting({field: value}), num_samples_per_task=2, raise_on_rollout_failure=True).run()
    assert server.samples() == []


@pytest.mark.parametrize("info", [{"inference_version": None}, {"token_inference_versions": None}, {}])
def test_nothing_reported_is_fine(server: Any, make_runner: Any, info: dict[str, Any]) -> None:
    assert make_runner(reporting(info), num_samples_per_task=2).run().failed == 0


def test_a_version_that_the_next_poll_tells_is_fine(server: Any, make_runner: Any) -> None:
    """The engine serves a version before the status was asked again: such a group waits for the poll."""
    server.trains = False
    released = threading.Timer(0.3, lambda: setattr(server, "version", 1))

    def rollout(task: int, context: Any) -> SampleGroup:
        return SampleGroup(samples=[helpers.good_sample(debug_info={"inference_version": 1})])

    server.version = 0
    runner = make_runner(rollout, status_polling_interval=0.3, num_batches=1)
    released.start()
    summary = runner.run()
    assert (summary.accepted, summary.failed) == (4, 0)
    assert {sample["debug_info"]["starting_inference_version"] for sample in server.samples()} == {1}


def test_an_older_version_in_dropless_mode_keeps_the_bound(server: Any, make_runner: Any) -> None:
    """Failure D2: what turns out to be too old is dropped, counted and replaced, also where nothing else ever is."""

    def rollout(task: int, context: Any) -> SampleGroup:
        info = {"inference_version": 0} if task % 4 == 3 else {}
        return SampleGroup(samples=[helpers.good_sample(debug_info=info)])

    summary = make_runner(rollout, num_batches=4, max_concurrency=2).run()
    assert server.sizes() == dict.fromkeys(range(4), 4)
    assert server.worst_staleness() <= 0
    assert summary.dropped_stale > 0
