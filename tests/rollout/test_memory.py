"""Reports O1 to O5: what a run holds does not grow with what it has done."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import tracemalloc
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from upweight.api_client import TokenFactory
from upweight.rollout import CyclingDataset, RolloutRunner
from upweight.rollout.models import SampleGroup

from . import helpers

BATCHES, BATCH = 60, 64
WINDOW = 5  # What is in flight comes and goes by some 100 kB: the least of so many batches is what is held in any case.
# The 2,240 samples that come between the two windows would take 1 MB if they were kept, the ids of their tasks and of the failed
# ones 0.5 MB.
GROWTH_BYTES = 400_000


@pytest.fixture
def far_server() -> Iterator[str]:
    """A server in a process of its own, so that what it keeps is not measured."""
    command = [sys.executable, "-m", "benchmarks.sdk.server", str(BATCH)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.terminate()


@pytest.fixture(autouse=True)
def _no_records() -> Iterator[None]:
    """The test runner keeps log records."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def troubled_rollout(task: int, context: Any) -> SampleGroup:
    """Half of them succeed; the others are rejected, fail or return nonsense."""
    match task % 6:
        case 0:
            return SampleGroup(is_rejected=True)
        case 1:
            raise ValueError("no luck")
        case 2:
            return SampleGroup()
        case _:
            return helpers.rollout(task, context)


async def async_rollout(task: int, context: Any) -> SampleGroup:
    return troubled_rollout(task, context)


@pytest.mark.parametrize(
    "mode", [pytest.param("async", marks=pytest.mark.ci), pytest.param("thread", marks=pytest.mark.soak)]
)
def test_what_a_run_holds_does_not_grow(mode: str, far_server: str, tmp_path: Path) -> None:
    """With a spool and a dataset cursor, from a third of the run to its end."""
    held: dict[int, int] = {}
    early, late = range(BATCHES // 3, BATCHES // 3 + WINDOW), range(BATCHES - WINDOW, BATCHES)
    settings = {"batch_size": BATCH, "num_batches": BATCHES, "max_concurrency": 64, "allowed_staleness": None}
    with TokenFactory(far_server, "k") as api:
        config = helpers.config(**settings, spool_dir=tmp_path, rollout_retry_backoff=0)
        function = async_rollout if mode == "async" else troubled_rollout
        runner = RolloutRunner(api, config, function, CyclingDataset(range(600)), progress="none")
        publish = runner._publish

        def measuring(progress: Any) -> None:
            publish(progress)
            if progress.batches_filled in (*early, *late) and progress.batches_filled not in held:
                gc.collect()
                held[progress.batches_filled] = tracemalloc.get_traced_memory()[0]

        runner._publish = measuring  # type: ignore[method-assign]
        tracemalloc.start()
        try:
            summary = runner.run()
        finally:
            tracemalloc.stop()
    assert summary.batches_filled == BATCHES
    assert min(summary.rejected, summary.failed) > 500
    first, last = (min(held[batch] for batch in window if batch in held) for window in (early, late))
    assert last - first < GROWTH_BYTES
    with urllib.request.urlopen(f"{far_server}/counts") as answer:
        assert json.load(answer)["samples"] == BATCH * BATCHES
