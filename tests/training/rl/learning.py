"""Small runs in which the trainers must learn: the answer's tokens shall all be the prompt's first token.

python -m tests.training.rl.learning      prints the tables of docs/soak
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from upweight.training.rl import (
    DPOConfig,
    DPOTrainer,
    GeneratedSequenceBatch,
    GroupRolloutBatch,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    PreferenceBatch,
    REINFORCEConfig,
    REINFORCETrainer,
    SequenceRolloutBatch,
)

VOCABULARY, WIDTH, PROMPT, ANSWER = 12, 32, 2, 6
PROMPTS, GROUP = 8, 8
LENGTH = PROMPT + ANSWER
ENOUGH, STEPS = 0.9, 60
METHODS = ("reinforce", "ppo", "grpo", "rloo", "dpo")
STALENESS, CORRECTIONS = (0, 1, 4, 8), ("none", "clip", "truncated", "decoupled")
SEEDS = range(5)  # of the table of staleness
UNBOUNDED = 1e9


class Policy(nnx.Module):
    """Sees the last token and the first one."""

    def __init__(self, seed: int, *, critic: bool = False) -> None:
        rngs = nnx.Rngs(seed)
        self.last, self.first = (nnx.Embed(VOCABULARY, WIDTH, rngs=rngs) for _ in range(2))
        self.mix, self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.critic = nnx.Linear(WIDTH, 1, rngs=rngs) if critic else None

    def hidden_states(self, tokens: jax.Array) -> jax.Array:
        return jnp.tanh(self.mix(self.last(tokens) + self.first(tokens[:, :1])))

    def head(self, hidden: jax.Array) -> jax.Array:
        return self.out(hidden)

    def value_head(self, hidden: jax.Array) -> jax.Array:
        assert self.critic is not None
        return self.critic(hidden)

    def __call__(self, tokens: jax.Array) -> Any:
        hidden = self.hidden_states(tokens)
        logits = self.out(hidden)
        return logits if self.critic is None else (logits, self.critic(hidden)[..., 0])


@nnx.jit
def scored(model: Policy, tokens: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(model.head(model.hidden_states(tokens))[:, :-1])
    return jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]


@nnx.jit
def sampled(model: Policy, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Prompts with their answers (B, LENGTH), and the log-prob of every action (B, LENGTH − 1)."""
    for place in range(PROMPT, LENGTH):
        logits = model.head(model.hidden_states(tokens))[:, place - 1]
        tokens = tokens.at[:, place].set(jax.random.categorical(jax.random.fold_in(key, place), logits))
    return tokens, scored(model, tokens)


class Rollouts:
    """Draws prompts and answers; everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self._prompts = np.random.default_rng(seed)
        self._key = jax.random.key(seed)

    def __call__(self, model: Policy) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Tokens, log-probs and rewards of PROMPTS groups of GROUP."""
        tokens = np.zeros((PROMPTS * GROUP, LENGTH), np.int32)
        tokens[:, :PROMPT] = np.repeat(self._prompts.integers(0, VOCABULARY, (PROMPTS, PROMPT)), GROUP, axis=0)
        self._key, key = jax.random.split(self._key)
        drawn, logp = sampled(model, jnp.asarray(tokens), key)
        return drawn, logp, (drawn[:, PROMPT:] == drawn[:, :1]).mean(axis=1)


RESPONSE = np.broadcast_to(np.arange(LENGTH) >= PROMPT, (PROMPTS * GROUP, LENGTH))


def batch_of(tokens: jax.Array, rewards: jax.Array) -> GeneratedSequenceBatch:
    return GeneratedSequenceBatch.from_sequences(tokens, response_mask=RESPONSE, rewards=rewards)


def values_of(model: Policy, tokens: jax.Array) -> jax.Array:
    """(B, LENGTH − 1): without the state after the last token, since nothing follows it."""
    return model.value_head(model.hidden_states(tokens[:, :-1]))[..., 0]


def best_and_worst(tokens: jax.Array, rewards: jax.Array) -> PreferenceBatch | None:
    """One pair a group, of those whose rewards differ; the first pair fills the places of the others."""
    by_group = np.asarray(rewards).reshape(PROMPTS, GROUP)
    groups = np.flatnonzero(by_group.max(1) > by_group.min(1))
    if not len(groups):
        return None
    groups = np.concatenate([groups, np.full(PROMPTS - len(groups), groups[0])])
    halves = [
        GeneratedSequenceBatch.from_sequences(tokens[groups * GROUP + pick[groups]], response_mask=RESPONSE[:PROMPTS])
        for pick in (by_group.argmax(1), by_group.argmin(1))
    ]
    return PreferenceBatch(chosen=halves[0], rejected=halves[1])


def make_step(method: str, model: Policy, rate: float) -> Callable[[jax.Array, jax.Array, jax.Array], Any]:
    """`step(tokens, log-probs, rewards)`: one update."""
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    if method == "dpo":
        reference = nnx.clone(model)
        dpo = DPOTrainer(model, reference, optimizer, DPOConfig(beta=0.1))

        def on_pairs(tokens: jax.Array, logp: jax.Array, rewards: jax.Array) -> Any:
            pairs = best_and_worst(tokens, rewards)
            return None if pairs is None else dpo.train_step(pairs)

        return on_pairs
    if method == "reinforce":
        reinforce = REINFORCETrainer(model, optimizer, REINFORCEConfig(gamma=1.0, entropy_coeff=0.0, baseline="loo"))
        return lambda tokens, logp, rewards: reinforce.train_step(
            GroupRolloutBatch(rollout=SequenceRolloutBatch(sequence_batch=batch_of(tokens, rewards)), group_size=GROUP)
        )
    if method == "ppo":
        ppo = PPOTrainer(model, optimizer, PPOConfig(gamma=1.0, entropy_coeff=0.0))
        return lambda tokens, logp, rewards: ppo.update(
            SequenceRolloutBatch(
                sequence_batch=batch_of(tokens, rewards), old_log_probs=logp, values=values_of(model, tokens)
            ),
            epochs=2,
        )
    config = GRPOConfig.preset(method, num_generations=GROUP, beta=0.0)
    grpo = GRPOTrainer(model, optimizer, config)
    return lambda tokens, logp, rewards: grpo.train_step(
        GroupRolloutBatch(
            rollout=SequenceRolloutBatch(sequence_batch=batch_of(tokens, rewards), old_log_probs=logp),
            group_size=GROUP,
        )
    )


def learn(method: str, seed: int, steps: int = STEPS, rate: float = 0.02) -> list[float]:
    """Mean reward of each step's rollouts, on the policy."""
    model = Policy(seed, critic=method == "ppo")
    step, rollouts = make_step(method, model, rate), Rollouts(seed)
    curve = []
    for _ in range(steps):
        tokens, logp, rewards = rollouts(model)
        curve.append(float(rewards.mean()))
        step(tokens, logp, rewards)
    return curve


def stale_config(correction: str) -> GRPOConfig:
    corrected: dict[str, Any] = {
        "none": {},
        "clip": {},
        "truncated": {"is_cap": 2.0},
        "decoupled": {"is_cap": UNBOUNDED},
    }[correction]
    return GRPOConfig.preset("dr_grpo", max_response_length=ANSWER, num_generations=GROUP, **corrected)


def learn_stale(correction: str, staleness: int, seed: int, steps: int = STEPS, rate: float = 0.03) -> list[float]:
    """Mean reward of the present policy in each step, with rollouts of the policy of `staleness` steps before; two updates each.

    none: the tokens are taken for the present policy's own. The others are a job's `correction`: with clip (its `none`) the clip is
    centred at the sampler; else at the policy before the two updates, and each token weighs π_before/π_sampler: at most 2
    (truncated), or without a bound (decoupled).
    """
    model = Policy(seed)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    trainer, rollouts, probes = (
        GRPOTrainer(model, optimizer, stale_config(correction)),
        Rollouts(seed),
        Rollouts(seed + 99),
    )
    earlier: deque[Policy] = deque([nnx.clone(model)], maxlen=staleness + 1)
    curve = []
    for _ in range(steps):
        tokens, logp, rewards = rollouts(earlier[0])
        curve.append(float(probes(model)[2].mean()))
        batch = batch_of(tokens, rewards)
        present = scored(model, tokens)
        for _ in range(2):
            rollout = SequenceRolloutBatch(
                sequence_batch=batch,
                old_log_probs=logp if correction == "clip" else present,
                sampler_log_probs=logp if correction in ("truncated", "decoupled") else None,
            )
            trainer.train_step(GroupRolloutBatch(rollout=rollout, group_size=GROUP))
        earlier.append(nnx.clone(model))
    return curve


def end(curve: list[float]) -> float:
    """Mean reward of the last five steps."""
    return float(np.mean(curve[-5:]))


def first_enough(curve: list[float]) -> int | None:
    """The first step whose rollouts reach ENOUGH."""
    return next((at for at, reward in enumerate(curve) if reward >= ENOUGH), None)


def main() -> None:
    print(f"| method | seed 0 | seed 1 | seed 2 |\n|---|{'---|' * 3}")
    for method in METHODS:
        curves = [learn(method, seed) for seed in range(3)]
        cells = [f"{curve[0]:.2f} → {end(curve):.2f}, step {first_enough(curve)}" for curve in curves]
        print(f"| {method} | {' | '.join(cells)} |", flush=True)
    print(f"\n| correction | {' | '.join(f'staleness {s}' for s in STALENESS)} |\n|---|{'---|' * len(STALENESS)}")
    for correction in CORRECTIONS:
        ends = [[end(learn_stale(correction, late, seed)) for seed in SEEDS] for late in STALENESS]
        print(f"| {correction} | {' | '.join(' '.join(f'{x:.2f}' for x in row) for row in ends)} |", flush=True)


if __name__ == "__main__":
    main()
