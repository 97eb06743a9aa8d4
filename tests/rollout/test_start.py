"""The start of a run: what the job tells then, limits on the wall clock, and failures that pass."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from upweight.rollout import JobInitializationTimeout, JobUnavailable

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
