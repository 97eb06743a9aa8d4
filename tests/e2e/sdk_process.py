"""`python -m tests.e2e.sdk_process URL KEY JOB MODEL BATCHES BATCH GROUP SPOOL`: a user's rollout script, as a process to kill."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.e2e.rollouts import Numbers, roll_out_number, slow_even_share
from upweight.api_client import TokenFactory
from upweight.rollout import RolloutConfig, RolloutRunner
from upweight.rollout.graders import GraderPool


def main() -> None:
    url, key, job_id, model, batches, batch, group, spool = sys.argv[1:]
    config = RolloutConfig(
        job_id=job_id,
        model_name=model,
        batch_size=int(batch),
        num_samples_per_task=int(group),
        num_batches=int(batches),
        max_concurrency=2 * int(batch),
        allowed_staleness=1,
        num_rollout_retries=20,
        status_polling_interval=0.05,
        spool_dir=Path(spool),
    )
    with TokenFactory(url, key) as client, GraderPool(slow_even_share, workers=2) as pool:
        rollout = partial(roll_out_number, grade=pool.grade)
        RolloutRunner(api_client=client, config=config, rollout_fn=rollout, dataset=Numbers()).run()


if __name__ == "__main__":
    main()
