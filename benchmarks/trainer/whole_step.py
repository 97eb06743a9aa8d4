"""A whole GRPO step of ours in one process, and a group's prompt computed once against once per sample; JSON. Started by `run`.

python -m benchmarks.trainer.whole_step step   [--steps 6]   the work of TRL's trainer in `run --trl-python`
python -m benchmarks.trainer.whole_step shared [--steps 3]   8 samples, 256 + 64 tokens
python -m benchmarks.trainer.whole_step typed  [--steps 3]   the same for GRPOTrainer on a decoder of the size of `decoder`
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.trainer.decoder import HEADS, INNER, LAYERS, VOCABULARY, WIDTH
from upweight.inference import InferenceScheduler
from upweight.models.config import DecoderConfig, RopeConfig
from upweight.models.decoder import Decoder, random_params
from upweight.online.generator import RolloutGenerator
from upweight.online.rewards import BaseRewardModel
from upweight.online.runner import RolloutRunner
from upweight.online.trainer import OnlineTrainer
from upweight.ops.samples import TrainBatch
from upweight.training import (
    GeneratedSequenceBatch,
    GroupRolloutBatch,
    GRPOConfig,
    GRPOTrainer,
    SequenceRolloutBatch,
)
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import PolicySettings
from upweight.weights.loading import load_model

PROMPTS, GROUP, NEW_TOKENS = 4, 8, 8
LONG_PROMPT, LONG_ANSWER = 256, 64


def timed(work: Callable[[], Any]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def medians(first: dict[str, float], later: list[dict[str, float]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"first": first}
    answer |= {name: statistics.median(one[name] for one in later) for name in ("seconds", "cpu_seconds")}
    return answer | {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


class Sums(BaseRewardModel):
    """1 for the right number alone, 0.4 where it stands anywhere, and up to 0.1 by chance: no group is flat, so every step has an
    update to compute."""

    chance = random.Random(1)

    def score(
        self, prompts: list[str], responses: list[list[str]], metadata: list[dict[str, Any]]
    ) -> list[list[float]]:
        def one(text: str, answer: str) -> float:
            right = 1.0 if text.strip() == answer else 0.4 * (answer in re.findall(r"\d+", text))
            return right + 0.1 * self.chance.random()

        return [
            [one(text, about["answer"]) for text in texts] for texts, about in zip(responses, metadata, strict=True)
        ]


def whole_steps(steps: int) -> dict[str, Any]:
    model = load_model("smollm2")
    draw = random.Random(0)
    with InferenceScheduler(model, model.tokenizer, max_batch_size=PROMPTS * GROUP) as scheduler:
        generator = RolloutGenerator(scheduler, model.tokenizer, max_tokens=NEW_TOKENS, group_size=GROUP)
        settings = PolicySettings.from_method({"learning_rate": 2e-5, "lora": None})
        trainer = OnlineTrainer(
            RolloutRunner(generator, Sums(), rollout_interval=1), PolicyTrainer(model.config, model.params, settings)
        )

        def step() -> None:
            pairs = [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(PROMPTS)]
            system = {"role": "system", "content": "Reply with the number only."}
            messages = [[system, {"role": "user", "content": f"What is {x}+{y}?"}] for x, y in pairs]
            trainer.train({"messages": messages, "metadata": [{"answer": str(x + y)} for x, y in pairs]})

        first, second, *later = [timed(step) for _ in range(2 + steps)]
    return medians({name: first[name] + second[name] for name in first}, later)


def long_group(seed: int, *, shared: bool) -> TrainBatch:
    """8 samples of one prompt; unshared: the same tokens, but each sample is a group of its own."""
    draw = np.random.default_rng(seed)
    prompt = draw.integers(100, 40000, LONG_PROMPT)
    rows = [np.concatenate([prompt, draw.integers(100, 40000, LONG_ANSWER)]) for _ in range(GROUP)]
    if not shared:  # other first tokens, so that nothing is common
        rows = [np.concatenate([[50 + i], row[1:]]) for i, row in enumerate(rows)]
    flat = GROUP * (LONG_PROMPT + LONG_ANSWER)
    mask = np.tile(np.repeat([0, 1], [LONG_PROMPT, LONG_ANSWER]), GROUP).astype(np.uint8)
    return TrainBatch(
        lengths=np.full(GROUP, LONG_PROMPT + LONG_ANSWER, np.int32),
        token_ids=np.concatenate(rows).astype(np.int32),
        logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
        mask=mask,
        reward=draw.standard_normal(GROUP).astype(np.float32),
        group=np.zeros(GROUP, np.int32),
        temperature=np.ones(flat, np.float32),
        raw_logprobs=np.full(flat, np.nan, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        filtered=np.zeros(flat, np.uint8),
        matched=np.ones(GROUP, np.uint8),
    )


def shared_prompt(steps: int) -> dict[str, Any]:
    model = load_model("smollm2")
    answer: dict[str, Any] = {}
    for name, shared in (("shared", True), ("unshared", False)):
        trainer = PolicyTrainer(model.config, model.params, PolicySettings.from_method({"lora": None}))
        runs = [timed(lambda t=trainer, i=i, s=shared: t.train(long_group(i, shared=s))) for i in range(2 + steps)]
        first, second, *later = runs
        answer[name] = medians({key: first[key] + second[key] for key in first}, later)
    answer["times_faster"] = {
        key: answer["unshared"][key] / answer["shared"][key] for key in ("seconds", "cpu_seconds")
    }
    return answer


def typed_batch(seed: int) -> GroupRolloutBatch[SequenceRolloutBatch]:
    draw = np.random.default_rng(seed)
    length = LONG_PROMPT + LONG_ANSWER
    tokens = draw.integers(0, VOCABULARY, (GROUP, length)).astype(np.int32)
    tokens[:, :LONG_PROMPT] = tokens[0, :LONG_PROMPT]
    sequences = GeneratedSequenceBatch.from_sequences(
        tokens,
        response_mask=np.broadcast_to(np.arange(length) >= LONG_PROMPT, tokens.shape).astype(np.float32),
        rewards=draw.standard_normal(GROUP).astype(np.float32),
    )
    old = np.full((GROUP, length - 1), -10.4, np.float32)
    return GroupRolloutBatch(SequenceRolloutBatch(sequences, old_log_probs=old), GROUP)


def shared_prompt_typed(steps: int) -> dict[str, Any]:
    """The head runs at answers only in both."""
    config = DecoderConfig(
        model_type="llama",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=WIDTH // HEADS,
        max_context=1024,
        norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        tied=False,
    )
    answer: dict[str, Any] = {}
    for name, shared in (("shared", True), ("unshared", False)):
        model = Decoder(config, random_params(config, jax.random.key(0)))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-5), wrt=nnx.Param)
        trainer = GRPOTrainer(model, optimizer, GRPOConfig(num_generations=GROUP, beta=0.0, entropy_coeff=0.0))
        trainer.share_prompts = shared
        first, *later = [
            timed(lambda t=trainer, i=i: jax.block_until_ready(t.train_step(typed_batch(i)))) for i in range(1 + steps)
        ]
        answer[name] = medians(first, later)
    answer["times_faster"] = {
        key: answer["unshared"][key] / answer["shared"][key] for key in ("seconds", "cpu_seconds")
    }
    return answer


CASES = {"step": (whole_steps, 6), "shared": (shared_prompt, 3), "typed": (shared_prompt_typed, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    measure, usual = CASES[args.case]
    print(json.dumps(measure(args.steps or usual)))


if __name__ == "__main__":
    main()
