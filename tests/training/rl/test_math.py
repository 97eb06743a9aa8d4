"""Losses and gradients of the trainers against float64 numpy: the model's forward pass, the formula, its slopes.

Every case drives `train_step`; `test_mutations.py` shows that altered formulas are noticed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.training.rl import small
from tests.training.rl.small import MASK, REWARDS, Arrays, Policy, check_step, grouped, optimizer, rollout, tokens
from upweight.training.rl import (
    DPOConfig,
    DPOTrainer,
    GeneratedSequenceBatch,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    PreferenceBatch,
    REINFORCEConfig,
    REINFORCETrainer,
)

OTHER = np.cos(np.arange(24)).reshape(4, 6)  # some number for each action


def aggregate(name: str, x: np.ndarray, length: int = 1) -> float:
    kept, count = (x * MASK).sum(1), MASK.sum(1)
    if name == "token_mean":
        return float(kept.sum() / count.sum())
    return float((kept / count if name == "seq_mean_token_mean" else kept / length).mean())


def entropy(p: Arrays) -> np.ndarray:
    logp = small.log_softmax(small.logits_of(p, tokens()))[:, :-1]
    return -(np.exp(logp) * logp).sum(-1)


def log_probs(p: Arrays) -> np.ndarray:
    return small.log_probs_of(small.logits_of(p, tokens()), tokens())


def clipped(ratio: np.ndarray, adv: np.ndarray, low: float, high: float, dual: float | None = None) -> np.ndarray:
    loss = -np.minimum(ratio * adv, np.clip(ratio, 1 - low, 1 + high) * adv)
    return loss if dual is None else np.where(adv < 0, np.minimum(loss, -dual * adv), loss)


def whitened(x: np.ndarray, eps: float = 1e-8) -> np.ndarray:
    kept = x[MASK > 0]
    return MASK * (x - kept.mean()) / np.sqrt(kept.var() + eps)


def returns_of(rewards: np.ndarray, gamma: float) -> np.ndarray:
    out = np.zeros(MASK.shape)
    for row in range(4):
        running = 0.0
        for t in reversed(np.flatnonzero(MASK[row])):
            running = rewards[row, t] + gamma * running
            out[row, t] = running
    return out


def terminal(rewards: np.ndarray) -> np.ndarray:
    out = np.zeros(MASK.shape)
    for row in range(4):
        out[row, np.flatnonzero(MASK[row])[-1]] = rewards[row]
    return out


def normalized(rewards: np.ndarray, ddof: int = 0) -> np.ndarray:
    groups = rewards.reshape(2, 2)
    spread = groups.std(axis=1, ddof=ddof, keepdims=True)
    return ((groups - groups.mean(axis=1, keepdims=True)) / (spread + 1e-8)).reshape(-1)


# REINFORCE ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "returns"),
    [
        ({"normalize_returns": False}, lambda: returns_of(terminal(REWARDS), 0.99)),
        ({}, lambda: whitened(returns_of(terminal(REWARDS), 0.99))),
        (
            {"gamma": 1.0, "baseline": "batch", "normalize_returns": False},
            lambda: returns_of(terminal(REWARDS - REWARDS.mean()), 1.0),
        ),
        (
            {"gamma": 0.9, "baseline": "loo", "normalize_returns": False},
            lambda: returns_of(terminal((4 * REWARDS - REWARDS.sum()) / 3), 0.9),
        ),
    ],
)
def test_reinforce(options: dict[str, Any], returns: Callable[[], np.ndarray]) -> None:
    config = REINFORCEConfig(entropy_coeff=0.05, **options)
    trainer = REINFORCETrainer(model := Policy(), optimizer(model, 1.0), config)

    def loss(p: Arrays) -> float:
        per_token = -log_probs(p) * returns() - 0.05 * entropy(p)
        return aggregate("token_mean", per_token)

    metrics = check_step(trainer, rollout(rewards=REWARDS), loss)
    assert metrics["num_tokens"] == 13
    assert metrics["response_length_mean"] == 3.25


def test_reinforce_with_token_rewards_and_with_returns() -> None:
    config = REINFORCEConfig(entropy_coeff=0.0, normalize_returns=False, loss_aggregation="seq_mean_token_sum")
    trainer = REINFORCETrainer(model := Policy(), optimizer(model, 1.0), config)
    given = returns_of(OTHER, 0.99)
    for fields in ({"token_rewards": OTHER.astype(np.float32)}, {"returns": given.astype(np.float32)}):
        check_step(
            trainer,
            rollout(**fields),
            lambda p: aggregate("seq_mean_token_sum", -log_probs(p) * given),
        )


# PPO ------------------------------------------------------------------------------------------------------------------


def ppo_loss(
    p: Arrays, config: PPOConfig, old: np.ndarray, adv: np.ndarray, ret: np.ndarray, v_old: np.ndarray
) -> float:
    high = config.clip_param if config.clip_param_high is None else config.clip_param_high
    lp, values = log_probs(p), small.values_of(p, tokens())
    policy = clipped(np.exp(lp - old), adv, config.clip_param, high, config.dual_clip)
    value = (values - ret) ** 2
    if config.value_clip is not None:
        near = np.clip(values, v_old - config.value_clip, v_old + config.value_clip)
        value = np.maximum(value, (near - ret) ** 2)
    whole = policy + config.vf_coeff * value - config.entropy_coeff * entropy(p)
    if config.kl_coeff:
        whole = whole + config.kl_coeff * 0.5 * (lp - OTHER) ** 2
    return aggregate(config.loss_aggregation, whole)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_param_high": 0.05, "dual_clip": 1.1, "loss_aggregation": "seq_mean_token_mean"},
        {"value_clip": 0.2, "kl_coeff": 0.3, "kl_estimator": "k2", "whiten_advantages": False, "entropy_coeff": 0.0},
    ],
)
def test_ppo(options: dict[str, Any]) -> None:
    config = PPOConfig(max_grad_norm=None, **options)
    model = Policy(critic=True)
    old, adv, ret = small.old_log_probs(model), OTHER, 2 * OTHER + 0.5
    v_old = small.values_of(small.arrays(model), tokens()) + 0.3 * OTHER
    batch = rollout(
        old_log_probs=old,
        advantages=adv.astype(np.float32),
        returns=ret.astype(np.float32),
        values=v_old.astype(np.float32),
        reference_log_probs=OTHER.astype(np.float32),
    )
    used = whitened(adv) if config.whiten_advantages else adv
    trainer = PPOTrainer(model, optimizer(model, 1.0), config)
    metrics = check_step(trainer, batch, lambda p: ppo_loss(p, config, old, used, ret, v_old))
    assert ("value_clip_fraction" in metrics) == (config.value_clip is not None)


def test_c23_ppo_computes_what_is_missing() -> None:
    """From sequence rewards and the values of the model itself, or of the batch, with a last value or without."""
    config = PPOConfig(max_grad_norm=None, gamma=0.9, gae_lambda=0.8, whiten_advantages=False)
    model = Policy(critic=True)
    trainer = PPOTrainer(model, optimizer(model, 1.0), config)
    old = small.old_log_probs(model)
    for values in (None, OTHER, np.concatenate([OTHER, OTHER[:, :1]], axis=1)):
        own = small.values_of(small.arrays(model), tokens()) if values is None else values[:, :6]
        last = np.zeros(4) if values is None or values.shape[1] == 6 else values[:, 6]
        adv = np.zeros(MASK.shape)
        for row in range(4):
            places = np.flatnonzero(MASK[row])
            after, running = last[row], 0.0
            for t in reversed(places):
                delta = terminal(REWARDS)[row, t] + 0.9 * after - own[row, t]
                running = delta + 0.9 * 0.8 * running
                adv[row, t], after = running, own[row, t]
        fields = {} if values is None else {"values": values.astype(np.float32)}
        batch = rollout(old_log_probs=old, rewards=REWARDS, **fields)
        check_step(trainer, batch, lambda p, a=adv, r=adv + own: ppo_loss(p, config, old, a, r, r))


# GRPO -----------------------------------------------------------------------------------------------------------------


def grpo_loss(p: Arrays, config: GRPOConfig, old: np.ndarray, adv: np.ndarray, start: Arrays, ref: Arrays) -> float:
    """`start` is where gradients are stopped."""
    high = config.clip_param if config.clip_param_high is None else config.clip_param_high
    lp, fixed = log_probs(p), log_probs(start)
    shift, count = (lp - old) * MASK, MASK.sum(1, keepdims=True)
    ratio = {
        "token": np.exp(lp - old),
        "sequence": np.exp(shift.sum(1, keepdims=True) / count),
        "sequence_sum": np.exp(shift.sum(1, keepdims=True)),
    }[config.ratio_level] * np.ones(MASK.shape)
    if config.policy_loss == "cispo":
        whole = -np.minimum(np.exp(fixed - old), config.cispo_max) * adv * lp
    elif config.policy_loss == "reinforce":
        whole = -adv * lp
    else:
        whole = clipped(ratio, adv, config.clip_param, high, config.dual_clip)
    if config.is_cap is not None:
        whole = whole * np.minimum(np.exp(old - OTHER), config.is_cap)
    if config.beta:
        d = lp - log_probs(ref)
        logp, logq = (small.log_softmax(small.logits_of(q, tokens()))[:, :-1] for q in (p, ref))
        kl = {
            "k1": d,
            "k2": d * d / 2,
            "k3": np.exp(-d) - 1 + d,
            "exact": (np.exp(logp) * (logp - logq)).sum(-1),
        }[config.kl_estimator]
        whole = whole + config.beta * kl
    if config.entropy_coeff:
        whole = whole - config.entropy_coeff * entropy(p)
    return aggregate(config.loss_aggregation, whole, config.max_response_length or 1)


GROUP, LOO = normalized(REWARDS), np.array([1.0, -1.0, -1.5, 1.5])
CASES: dict[str, tuple[GRPOConfig, np.ndarray]] = {
    "mirrored": (GRPOConfig(num_generations=2, beta=0.2), GROUP),
    "k1": (GRPOConfig(num_generations=2, beta=0.2, kl_estimator="k1", std_ddof=1), normalized(REWARDS, 1)),
    "k2": (
        GRPOConfig(num_generations=2, beta=0.2, kl_estimator="k2", scale_rewards="batch", entropy_coeff=0.0),
        LOO / 2 / (REWARDS.std() + 1e-8),
    ),
    "grpo": (GRPOConfig.preset("grpo", num_generations=2, beta=0.2), GROUP),
    "dr_grpo": (GRPOConfig.preset("dr_grpo", num_generations=2, max_response_length=9), LOO / 2),
    "dapo": (GRPOConfig.preset("dapo", num_generations=2, clip_param_high=0.03), GROUP),
    "gspo": (GRPOConfig.preset("gspo", num_generations=2, clip_param=0.01, clip_param_high=0.02), GROUP),
    "cispo": (GRPOConfig.preset("cispo", num_generations=2, cispo_max=1.1), GROUP),
    "rloo": (GRPOConfig.preset("rloo", num_generations=2), LOO),
    "reinforce": (GRPOConfig.preset("reinforce", num_generations=2), REWARDS),
    "is_cap": (GRPOConfig(num_generations=2, beta=0.0, entropy_coeff=0.0, is_cap=0.1), GROUP),
    "dual_clip": (GRPOConfig(num_generations=2, beta=0.0, entropy_coeff=0.0, dual_clip=1.05), GROUP),
}


def grpo(config: GRPOConfig) -> tuple[GRPOTrainer, np.ndarray, Arrays]:
    model, reference = Policy(), Policy(1)
    trainer = GRPOTrainer(model, optimizer(model, 1.0), config, reference_model=reference)
    return trainer, small.old_log_probs(model), small.arrays(reference)


@pytest.mark.parametrize("name", CASES)
def test_grpo(name: str) -> None:
    config, advantages = CASES[name]
    trainer, old, ref = grpo(config)
    sampler = {"sampler_log_probs": OTHER.astype(np.float32)} if config.is_cap else {}
    start = small.arrays(trainer.model)
    metrics = check_step(
        trainer,
        grouped(old_log_probs=old, **sampler),
        lambda p: grpo_loss(p, config, old, advantages[:, None] * MASK, start, ref),
    )
    assert {"policy_loss", "entropy", "kl_penalty", "total_loss", "advantages_mean", "advantages_std"} <= metrics.keys()
    assert (metrics["kl_penalty"] == 0.0) == (config.beta == 0)


def test_grpo_at_a_temperature_of_each_row() -> None:
    """Log-probs, entropy and exact KL are those of the logits divided by it, of the policy and of the reference."""
    config, advantages = CASES["mirrored"]
    trainer, old, ref = grpo(config)
    heat, plain = np.array([1.0, 2.0, 0.5, 1.5]), small.logits_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "logits_of", lambda p, ids: plain(p, ids) / heat[:, None, None])
        check_step(
            trainer,
            grouped(old_log_probs=old, temperature=heat.astype(np.float32)),
            lambda p: grpo_loss(p, config, old, advantages[:, None] * MASK, p, ref),
        )


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_grpo_token_returns_are_whitened_over_the_batch(name: str) -> None:
    config = GRPOConfig.preset(name, num_generations=2)
    trainer, old, ref = grpo(config)
    plain = returns_of(terminal(REWARDS), 1.0) if name == "reinforce_pp" else (LOO / 2)[:, None] * MASK
    start, advantages = small.arrays(trainer.model), whitened(plain)
    check_step(trainer, grouped(old_log_probs=old), lambda p: grpo_loss(p, config, old, advantages, start, ref))


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp"])
def test_kl_in_the_reward(name: str) -> None:
    """k1 of the policy that drew the batch to the reference, summed over an answer before the leave-one-out, or per token."""
    config = GRPOConfig.preset(name, num_generations=2, kl_coeff=0.4)
    trainer, old, ref = grpo(config)
    k1 = 0.4 * (old - log_probs(ref)) * MASK
    if name == "rloo":
        rewards = (REWARDS - k1.sum(1)).reshape(2, 2)
        advantages = (rewards - rewards[:, ::-1]).reshape(-1)[:, None] * MASK
    else:
        advantages = whitened(returns_of(terminal(REWARDS) - k1, 1.0))
    start = small.arrays(trainer.model)
    check_step(trainer, grouped(old_log_probs=old), lambda p: grpo_loss(p, config, old, advantages, start, ref))


# DPO ------------------------------------------------------------------------------------------------------------------

DPO_CASES = {
    "sigmoid": DPOConfig(beta=0.7),
    "smoothed": DPOConfig(beta=0.7, label_smoothing=0.2),
    "free": DPOConfig(beta=0.7, reference_free=True),
    "normalized": DPOConfig(beta=0.7, length_normalized=True),
    "robust": DPOConfig(beta=0.7, loss_type="robust", label_smoothing=0.2),
    "hinge": DPOConfig(beta=0.7, loss_type="hinge"),
    "ipo": DPOConfig(beta=0.7, loss_type="ipo"),
    "simpo": DPOConfig(beta=2.0, loss_type="simpo"),
}


def pairs(**chosen: Any) -> PreferenceBatch[GeneratedSequenceBatch]:
    """Rejected answers are one token shorter in their arrays, and stand elsewhere."""
    make = GeneratedSequenceBatch.from_sequences
    return PreferenceBatch(
        make(tokens(), response_mask=small.RESPONSE, **chosen),
        make(tokens(seed=3)[:, :6], response_mask=REJECTED, **{k: v[:, :5] for k, v in chosen.items()}),
    )


REJECTED = small.RESPONSE[::-1, :6]


def dpo_loss(p: Arrays, ref: Arrays, config: DPOConfig) -> float:
    is_mean = config.length_normalized or config.loss_type in ("ipo", "simpo")

    def score(p: Arrays, ids: np.ndarray) -> np.ndarray:
        mask = MASK if ids is chosen else REJECTED[:, 1:]
        total = (small.log_probs_of(small.logits_of(p, ids), ids) * mask).sum(1)
        return total / mask.sum(1) if is_mean else total

    chosen, rejected = tokens(), tokens(seed=3)[:, :6]
    margin = score(p, chosen) - score(p, rejected)
    if not config.reference_free and config.loss_type != "simpo":
        margin = margin - (score(ref, chosen) - score(ref, rejected))
    x, share = config.beta * margin, config.label_smoothing
    good, bad = -np.log1p(np.exp(-x)), -np.log1p(np.exp(x))
    return float(
        {
            "sigmoid": -(1 - share) * good - share * bad,
            "robust": (-(1 - share) * good + share * bad) / (1 - 2 * share),
            "hinge": np.maximum(0, 1 - x),
            "ipo": (margin - 1 / (2 * config.beta)) ** 2,
            "simpo": np.log1p(np.exp(config.simpo_gamma - x)),
        }[config.loss_type].mean()
    )


@pytest.mark.parametrize("name", DPO_CASES)
def test_dpo(name: str) -> None:
    config, model, reference = DPO_CASES[name], Policy(), Policy(1)
    trainer = DPOTrainer(model, reference, optimizer(model, 1.0), config)
    ref = small.arrays(reference)
    metrics = check_step(trainer, pairs(), lambda p: dpo_loss(p, ref, config))
    assert metrics["margin"] == pytest.approx(metrics["chosen_log_ratios"] - metrics["rejected_log_ratios"], abs=1e-5)
    assert metrics["rewards_chosen"] == pytest.approx(config.beta * metrics["chosen_log_ratios"], abs=1e-6)


def test_c08_dpo_takes_the_reference_scores_that_batches_bring() -> None:
    """The same loss with the reference's log-probs in the batch, and no forward pass of any reference."""
    reference = small.arrays(Policy(1))
    chosen, rejected = tokens(), tokens(seed=3)[:, :6]
    own = [small.log_probs_of(small.logits_of(reference, ids), ids).astype(np.float32) for ids in (chosen, rejected)]
    make = GeneratedSequenceBatch.from_sequences
    batch = PreferenceBatch(
        make(chosen, response_mask=small.RESPONSE, reference_log_probs=own[0]),
        make(rejected, response_mask=REJECTED, reference_log_probs=own[1]),
    )
    config = DPOConfig(beta=0.7, precomputed_reference=True)
    trainer = DPOTrainer(model := Policy(), None, optimizer(model, 1.0), config)
    check_step(trainer, batch, lambda p: dpo_loss(p, reference, config))
    with pytest.raises(ValueError, match="chosen has no reference_log_probs"):
        trainer.train_step(pairs())
