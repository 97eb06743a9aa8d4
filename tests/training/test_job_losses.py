"""The loss of each preset that compares groups, cut into micro-batches as an update is, against a few lines of numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from batch_makers import make_batch

from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.training.policy_step import TargetScores, policy_loss
from upweight.training.policy_trainer import PolicyTrainer, Targets
from upweight.training.settings import PRESETS, PolicySettings

LENGTHS = (3, 15, 2, 24)  # trained tokens of each sample, after a prompt of two
LIMIT, CAP = 7, 1.1


@pytest.fixture(scope="module")
def trainer(config: DecoderConfig, params: Params) -> PolicyTrainer:
    return PolicyTrainer(config, params, PolicySettings(), microbatch_tokens=32)


def clipped(ratio: np.ndarray, advantage: float, low: float, high: float) -> np.ndarray:
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


Term = Callable[
    [np.ndarray, np.ndarray, float], np.ndarray
]  # (log-probs, log-ratios, advantage) of one sample → its tokens
TERMS: dict[str, Term] = {
    "grpo": lambda lp, d, a: clipped(np.exp(d), a, 0.2, 0.2),
    "bnpo": lambda lp, d, a: clipped(np.exp(d), a, 0.2, 0.2),
    "dr_grpo": lambda lp, d, a: clipped(np.exp(d), a, 0.2, 0.2),
    "dapo": lambda lp, d, a: clipped(np.exp(d), a, 0.2, 0.28),
    "gspo": lambda lp, d, a: clipped(np.full(len(d), np.exp(d.mean())), a, 3e-4, 4e-4),
    "rloo": lambda lp, d, a: clipped(np.full(len(d), np.exp(d.sum())), a, 0.2, 0.2) / len(d),
    "cispo": lambda lp, d, a: -np.minimum(np.exp(d), 5.0) * a * lp,
}
REDUCED: dict[str, Callable[[list[np.ndarray]], float]] = {
    "grpo": lambda terms: float(np.mean([term.mean() for term in terms])),
    "gspo": lambda terms: float(np.mean([term.mean() for term in terms])),
    "dr_grpo": lambda terms: float(np.mean([term.sum() / LIMIT for term in terms])),
    "rloo": lambda terms: float(np.mean([term.sum() for term in terms])),
    "bnpo": lambda terms: float(np.concatenate(terms).mean()),
    "dapo": lambda terms: float(np.concatenate(terms).mean()),
    "cispo": lambda terms: float(np.concatenate(terms).mean()),
}


@pytest.mark.parametrize("algorithm", list(TERMS))
def test_the_loss_of_a_batch_is_the_formula(trainer: PolicyTrainer, algorithm: str) -> None:
    rng = np.random.default_rng(3)
    batch = make_batch([([1, 2 + i], [5] * length) for i, length in enumerate(LENGTHS)], np.zeros(len(LENGTHS)))
    kept = batch.mask > 0
    total = len(batch.token_ids)
    lp = rng.normal(-2, 0.5, total).astype(np.float32)
    old = (lp + rng.normal(0, 0.2, total)).astype(np.float32)
    sampler = (old + rng.normal(0, 0.2, total)).astype(np.float32)
    advantage = np.float32([1.0, -0.5, 2.0, -1.5])
    settings = PolicySettings(algorithm=algorithm, preset=PRESETS[algorithm], is_cap=CAP, max_response_length=LIMIT)
    trainer.settings = settings
    targets = Targets(np.repeat(advantage, batch.lengths), old)
    _, pieces = trainer._pieces(replace(batch, logprobs=sampler), np.arange(batch.num_samples), targets)
    assert len(pieces) > 1
    loss = 0.0
    for cut, packed in pieces:
        found, _ = policy_loss(settings, batch.num_samples, packed, TargetScores(jnp.asarray(lp[cut.source])))
        loss += float(found)
    terms = []
    for i, (start, end) in enumerate(zip(batch.starts[:-1], batch.starts[1:], strict=True)):
        own = np.flatnonzero(kept[start:end]) + start
        weight = np.minimum(np.exp(old[own] - sampler[own]), CAP)
        terms.append(TERMS[algorithm](lp[own], lp[own] - old[own], float(advantage[i])) * weight)
    assert loss == pytest.approx(REDUCED[algorithm](terms), rel=1e-5)
