"""Samples of three turns through the real server: each turn is joined to its own completion, and nothing was re-encoded."""

from __future__ import annotations

from tests.e2e.conftest import BATCH, GROUP, Site
from tests.e2e.conversations import TURNS, converse
from tests.e2e.rollouts import Numbers
from tests.e2e.test_loop import FP32_NOISE
from upweight.rollout import RolloutConfig, RolloutRunner


def test_three_turns_match_the_engine_and_are_joined_turn_by_turn(site: Site) -> None:
    job_id = site.create(learning_rate=1e-2, num_batches=2)
    with site.client as client:
        config = RolloutConfig(
            job_id=job_id,
            model_name=site.model,
            batch_size=BATCH,
            num_samples_per_task=GROUP,
            num_batches=2,
            max_concurrency=2 * BATCH,
            allowed_staleness=-1,
            raise_on_rollout_failure=True,
            status_polling_interval=0.05,
        )
        summary = RolloutRunner(api_client=client, config=config, rollout_fn=converse, dataset=Numbers()).run()
    assert summary.batches_filled == 2, summary
    job = site.wait(job_id)
    assert job["ledger"]["unmatched"] == 0
    for version in job["versions"][1:]:
        metrics = version["metrics"]
        assert metrics["trained_tokens"] >= BATCH * TURNS
        assert metrics["on_policy_tokens"] == metrics["num_tokens"]
        assert metrics["mismatch_max"] < FP32_NOISE
