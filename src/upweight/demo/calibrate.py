"""`python -m upweight.demo.calibrate OPTIONS.json`: how long one batch takes here.

Loads the model, makes one batch as the job will (generate, train, hand over) twice, throws the result away and prints
`{"step_seconds", "token_seconds"}` of the second round. The first round also leaves the job's programs in the compilation cache.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from upweight.demo.plan import DemoPlan
from upweight.demo.record import DemoOptions
from upweight.demo.sums import SumDataset, split_tasks
from upweight.examples.utils import group_advantages


def main() -> None:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(calibrate(DemoOptions(**arguments["options"]), arguments["cache"])), flush=True)


def calibrate(options: DemoOptions, cache_folder: str) -> dict[str, float]:
    from upweight.inference.compilation_cache import use_compilation_cache

    use_compilation_cache(cache_folder)

    from upweight.inference.engine import Engine
    from upweight.inference.gather import answers_to
    from upweight.inference.types import SamplingParams
    from upweight.training.policy_trainer import PolicyTrainer
    from upweight.training.settings import PolicySettings
    from upweight.weights.loading import load_model

    plan = DemoPlan(options)
    model = load_model(options.model)
    trainer = PolicyTrainer(model.config, model.params, PolicySettings.from_method(plan.method(2)["reinforcement"]))
    engine = Engine(model.config, model.params, model.tokenizer, max_rows=plan.batch_size).start()
    dataset = SumDataset(split_tasks(options.seed).train, options.seed)
    rng = np.random.default_rng(options.seed)
    seconds = {}
    for _ in range(2):
        began = time.monotonic()
        prompts = [model.tokenizer.encode_chat(task.messages) for task in dataset.sample(plan.groups)]
        sampling = SamplingParams(max_tokens=plan.rollout.max_tokens)
        rows = [prompt for prompt in prompts for _ in range(plan.group_size)]
        outputs = answers_to(engine, rows, sampling)
        generated = time.monotonic()
        rewards = [group_advantages(rng.random(plan.group_size).tolist()) for _ in prompts]
        trainer.train(_batch(rows, outputs, rewards))
        engine.set_weights(trainer.policy_params(), trainer.version)
        seconds = {
            "step_seconds": time.monotonic() - began,
            "token_seconds": (generated - began) / plan.rollout.max_tokens,
        }
    engine.stop()
    return seconds


def _batch(prompts: list[list[int]], outputs: list[Any], rewards: list[list[float]]) -> Any:
    from upweight.ops.samples import TrainBatch

    ids = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
    masks = [[0] * len(prompt) + [1] * len(output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    logprobs = [[0.0] * len(prompt) + output.logprobs for prompt, output in zip(prompts, outputs, strict=True)]
    flat = [value for row in rewards for value in row]
    count, total = len(ids), sum(map(len, ids))
    return TrainBatch(
        lengths=np.array([len(row) for row in ids], np.int32),
        token_ids=np.concatenate([np.array(row, np.int32) for row in ids]),
        logprobs=np.concatenate([np.array(row, np.float32) for row in logprobs]),
        mask=np.concatenate([np.array(row, np.uint8) for row in masks]),
        reward=np.array(flat, np.float32),
        group=np.repeat(np.arange(len(rewards), dtype=np.int32), len(rewards[0])),
        temperature=np.ones(total, np.float32),
        raw_logprobs=np.full(total, np.nan, np.float32),
        versions=np.full(total, -1, np.int32),
        filtered=np.zeros(total, np.uint8),
        matched=np.ones(count, np.uint8),
    )


if __name__ == "__main__":
    main()
