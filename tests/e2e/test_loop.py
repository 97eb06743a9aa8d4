"""An item's whole journey, hops 1–9, through real processes."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import httpx
import jax.numpy as jnp
import numpy as np
import pytest

from tests.e2e.conftest import BATCH, GROUP, Site
from tests.e2e.rollouts import Numbers, roll_out_number
from upweight.ops.samples import TrainBatch
from upweight.rollout import RolloutConfig, RolloutRunner

FP32_NOISE = 2e-5  # of log-probs of the tiny model, whose logits are small


def run_rollouts(site: Site, job_id: str, num_batches: int, staleness: int = -1) -> None:
    with site.client as client:
        config = RolloutConfig(
            job_id=job_id,
            model_name=site.model,
            batch_size=BATCH,
            num_samples_per_task=GROUP,
            num_batches=num_batches,
            max_concurrency=2 * BATCH,
            allowed_staleness=staleness,
            num_rollout_retries=3,
            status_polling_interval=0.05,
        )
        runner = RolloutRunner(api_client=client, config=config, rollout_fn=roll_out_number, dataset=Numbers())
        summary = runner.run()
    assert summary.batches_filled == num_batches, summary


@pytest.mark.parametrize("lora", [{"rank": 4}, None], ids=["lora", "full"])
def test_on_policy_mismatch_is_noise_at_every_version_and_every_number_adds_up(site: Site, lora: dict | None) -> None:
    job_id = site.create(lora=lora, learning_rate=1e-2, num_batches=4)
    run_rollouts(site, job_id, 4)
    job = site.wait(job_id)
    versions = job["versions"]
    assert [v["version"] for v in versions] == [0, 1, 2, 3, 4]
    assert len({v["fingerprint"] for v in versions}) == 5
    for version in versions[1:]:
        metrics = version["metrics"]
        assert metrics["mismatch_max"] < FP32_NOISE
        assert metrics["on_policy_tokens"] == metrics["num_tokens"]
        assert metrics["grad_norm"] > 0
        assert 0 <= metrics["reward_mean"] <= 1
    ledger = job["ledger"]
    assert ledger["accepted"] == 4 * BATCH == ledger["trained"] + ledger["zero_advantage"]
    assert ledger["unmatched"] == 0
    _check_saved_weights(Path(job["weights"]), Path(site.model), changed=True)


def test_zero_learning_rate_leaves_weights_and_mismatch_where_they_are(site: Site) -> None:
    job_id = site.create(learning_rate=0.0, num_batches=3)
    run_rollouts(site, job_id, 3, staleness=0)
    versions = site.wait(job_id)["versions"]
    assert len({v["fingerprint"] for v in versions}) == 1
    assert all(v["metrics"]["mismatch_max"] < FP32_NOISE for v in versions[1:] if "mismatch_max" in v["metrics"])
    assert all(v["metrics"]["ratio_max"] == pytest.approx(1.0, abs=1e-4) for v in versions[1:])


def _check_saved_weights(folder: Path, start: Path, *, changed: bool) -> None:
    """What was written loads again and differs from the start model."""
    from upweight.weights.loading import load_model

    saved, before = load_model(str(folder)), load_model(str(start))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    ids = saved.tokenizer.encode("What is 1+2?")
    assert ids == before.tokenizer.encode("What is 1+2?")
    gap = np.abs(np.asarray(saved.module()(jnp.asarray([ids])) - before.module()(jnp.asarray([ids])))).max()
    assert (gap > 1e-4) == changed


def test_a_tensor_withheld_at_hand_over_fails_the_job(tmp_path: Path, tiny_model_folder: Path) -> None:
    """The engine keeps one old array: the fingerprint over what decode receives tells."""
    from upweight.server.worker.core import WorkerCore
    from upweight.server.worker_protocol import WorkerSpec

    spec = WorkerSpec(
        job_id="j",
        model=str(tiny_model_folder),
        model_names=["tiny"],
        settings={"batch_size": 2, "learning_rate": 1e-2},
        socket="unused",
        folder=str(tmp_path),
        max_slots=4,
    )
    core = WorkerCore(spec)
    core.start()
    core.wait_ready()
    batch = _toy_batch()
    first = core.train(0, batch)
    assert first.fingerprint_ok
    engine = core.engine
    honest = engine.set_weights

    def withhold_one(params: dict, version: int) -> str:
        old = engine.runner.params
        return honest({**params, "norm": old["norm"]}, version)

    engine.set_weights = withhold_one  # type: ignore[method-assign]
    assert not core.train(1, batch).fingerprint_ok
    engine.set_weights = honest  # type: ignore[method-assign]
    assert core.train(2, batch).fingerprint_ok
    engine.stop()


def _toy_batch() -> TrainBatch:
    ids = np.arange(100, 112, dtype=np.int32)
    return TrainBatch(
        lengths=np.array([6, 6], np.int32),
        token_ids=ids,
        logprobs=np.full(12, -10.8, np.float32),
        mask=np.tile(np.array([0, 0, 0, 1, 1, 1], np.uint8), 2),
        reward=np.array([1.0, -1.0], np.float32),
        group=np.zeros(2, np.int32),
        temperature=np.ones(12, np.float32),
        raw_logprobs=np.full(12, np.nan, np.float32),
        versions=np.full(12, -1, np.int32),
        filtered=np.zeros(12, np.uint8),
        matched=np.zeros(2, np.uint8),
    )


def test_killed_worker_and_killed_server_lose_nothing(site: Site) -> None:
    """SIGKILL of the worker, then of the server, in the middle of a run: the planned batches, each sample once."""
    job_id = site.create(lora={"rank": 4}, learning_rate=1e-2, num_batches=6, checkpoint_every=2)
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            try:
                version = site.progress(job_id)["inference_version"]
            except httpx.HTTPError:  # the server is being killed
                continue
            if version is not None:
                seen.append(version)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run_rollouts(site, job_id, 2)
        _kill(site.progress(job_id)["worker"]["pid"])
        run_rollouts(site, job_id, 4)
        _kill(site.server.pid)
        site.server.stop()
        site.restart()
        run_rollouts(site, job_id, 6)
        job = site.wait(job_id)
    finally:
        done.set()
        watcher.join()
    assert seen == sorted(seen)
    assert job["version"] == 6
    assert job["filled_batches"] == 6
    assert job["ledger"]["accepted"] == 6 * BATCH == job["ledger"]["trained"] + job["ledger"]["zero_advantage"]
    assert len({v["fingerprint"] for v in job["versions"]}) == 7


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
