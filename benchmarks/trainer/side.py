"""One trainer on one piece of work, measured in a process of its own; one line of JSON. Started by `run`.

    python -m benchmarks.trainer.side PACKAGE CASE [--steps 5]

PACKAGE is the trainers' package: `upweight.training.rl`, or the peer's `artifex.generative_models.training.rl`. Both have the same
names, so what follows is written once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.trainer.decoder import VOCABULARY, Decoder

ROWS, LENGTH, PROMPT, GROUP = 16, 256, 64, 4


def sequences(draw: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and response mask [rows, LENGTH]: prompts of 64 tokens, answers of 96 to 192."""
    answer = draw.integers((LENGTH - PROMPT) // 2, LENGTH - PROMPT + 1, (rows, 1))
    place = np.arange(LENGTH)[None]
    tokens = np.where(place < PROMPT + answer, draw.integers(0, VOCABULARY, (rows, LENGTH)), 0)
    return tokens.astype(np.int32), ((place >= PROMPT) & (place < PROMPT + answer)).astype(np.float32)


def make_batch(rl: Any, case: str) -> Any:
    draw = np.random.default_rng(0)
    made = rl.GeneratedSequenceBatch.from_sequences
    if case == "dpo":
        pairs = [sequences(draw, ROWS // 2) for _ in range(2)]
        chosen, rejected = (made(jnp.asarray(t), response_mask=jnp.asarray(m)) for t, m in pairs)
        return rl.PreferenceBatch(chosen=chosen, rejected=rejected)
    tokens, mask = sequences(draw, ROWS)
    rewards = jnp.asarray(draw.uniform(size=ROWS), jnp.float32)
    old = jnp.asarray(-10.4 + 0.1 * draw.standard_normal((ROWS, LENGTH - 1)), jnp.float32)
    each = jnp.broadcast_to(rewards[:, None], (ROWS, LENGTH - 1))
    batch = made(jnp.asarray(tokens), response_mask=jnp.asarray(mask), rewards=rewards)
    if case == "grpo":
        return rl.GroupRolloutBatch(
            rollout=rl.SequenceRolloutBatch(sequence_batch=batch, old_log_probs=old), group_size=GROUP
        )
    if case == "ppo":
        return rl.SequenceRolloutBatch(sequence_batch=batch, old_log_probs=old, returns=each, advantages=each - 0.5)
    return rl.SequenceRolloutBatch(sequence_batch=batch, token_rewards=each)


def with_reference_scores(rl: Any, batch: Any, reference: Decoder) -> Any:
    """Pairs that carry the reference model's token log-probs, as a caller computes them once for many epochs."""

    @nnx.jit
    def scores(model: Decoder, tokens: jax.Array) -> jax.Array:
        logits = model(tokens)[:, :-1]
        return jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)

    made = rl.GeneratedSequenceBatch.from_sequences
    halves = [
        made(h.sequences, response_mask=h.response_mask, reference_log_probs=scores(reference, h.sequences))
        for h in (batch.chosen, batch.rejected)
    ]
    return rl.PreferenceBatch(chosen=halves[0], rejected=halves[1])


def make_trainer(rl: Any, case: str) -> tuple[Any, Decoder, Any]:
    model = Decoder(0, critic=case == "ppo")
    optimizer = nnx.Optimizer(model, optax.adamw(1e-5), wrt=nnx.Param)
    batch = make_batch(rl, case.partition("_")[0])
    if case == "grpo":
        return rl.GRPOTrainer(model, optimizer, rl.GRPOConfig(), reference_model=Decoder(1)), model, batch
    if case == "ppo":
        return rl.PPOTrainer(model, optimizer, rl.PPOConfig()), model, batch
    if case == "dpo":
        return rl.DPOTrainer(model, Decoder(1), optimizer, rl.DPOConfig()), model, batch
    if case == "dpo_precomputed":
        batch = with_reference_scores(rl, batch, Decoder(1))
        return rl.DPOTrainer(model, None, optimizer, rl.DPOConfig(precomputed_reference=True)), model, batch
    return rl.REINFORCETrainer(model, optimizer, rl.REINFORCEConfig()), model, batch


class Compilations:
    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count, self.seconds = self.count + 1, self.seconds + duration


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("case", choices=["grpo", "ppo", "dpo", "dpo_precomputed", "reinforce"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatches", type=int, help="parts of a batch, for trainers that can take one in parts")
    args = parser.parse_args()
    trainer, model, batch = make_trainer(importlib.import_module(args.package), args.case)
    compiled = Compilations()
    options = {"num_microbatches": args.microbatches} if args.microbatches else {}

    def step() -> dict[str, float]:
        wall, cpu, count, seconds = time.perf_counter(), time.process_time(), compiled.count, compiled.seconds
        loss, _ = trainer.train_step(batch, **options)
        jax.block_until_ready((loss, nnx.state(model)))
        return {
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "programs": compiled.count - count,
            "compile_seconds": compiled.seconds - seconds,
            "loss": float(loss),
        }

    first, *later = [step() for _ in range(1 + args.steps)]
    answer = {
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "first": first,
        "seconds": statistics.median(one["seconds"] for one in later),
        "cpu_seconds": statistics.median(one["cpu_seconds"] for one in later),
        "programs_later": sum(one["programs"] for one in later),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
