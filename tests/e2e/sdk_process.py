"""`python -m tests.e2e.sdk_process URL KEY JOB MODEL BATCHES BATCH GROUP SPOOL`: a user's rollout script, as a process to kill."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.rollouts import Numbers, roll_out_number
from upweight.api_client import TokenFactory
from upweight.rollout import RolloutConfig, RolloutRunner


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
    with TokenFactory(url, key) as client:
        RolloutRunner(api_client=client, config=config, rollout_fn=roll_out_number, dataset=Numbers()).run()


if __name__ == "__main__":
    main()
