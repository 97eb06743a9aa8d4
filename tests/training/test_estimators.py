"""What a job's options mean, against float64 numpy on the logits of a plain forward pass: advantages, loss and its gradient.

Each case trains one batch in two epochs and compares the gradient of both updates: at the first the policy is the one that
the ratio is against, at the second it has moved.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from batch_makers import PADDED, make_batch, standard_samples

from tests.training.rl.test_mutations import mutated
from upweight.models.config import DecoderConfig
from upweight.models.decoder import Decoder
from upweight.models.layers import Params
from upweight.models.lora import merge
from upweight.ops import logprobs
from upweight.ops.samples import TrainBatch
from upweight.training import critic, policy_step, policy_trainer, token_advantages
from upweight.training.policy_step import Trained
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import PolicySettings

GROUPS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 3]
TEMPERATURES = [1.0, 0.6, 1.4, 1.0] * 3
BETA, GAMMA, LAMBDA, CAP = 0.3, 0.9, 0.8, 2.0
PPO = {"algorithm": "ppo", "critic": {"gamma": GAMMA, "gae_lambda": LAMBDA, "learning_rate": 0.03}}
LORA = {"rank": 3, "alpha": 6}
CASES: dict[str, dict[str, Any]] = {
    "reinforce": {"algorithm": "reinforce", "correction": "decoupled", "beta": BETA},
    "reinforce_pp": {"algorithm": "reinforce_pp", "correction": "masked", "beta": BETA, "kl_estimator": "k3"},
    "reinforce_pp_baseline": {"algorithm": "reinforce_pp_baseline", "advantage": "reward", "beta": BETA},
    "ppo": {**PPO, "correction": "none", "beta": BETA},
    "ppo on an adapter": {**PPO, "correction": "masked", "lora": LORA, "beta": BETA, "kl_estimator": "exact"},
    "rloo": {"algorithm": "rloo", "advantage": "group", "beta": BETA},
    "exact KL": {
        "algorithm": "bnpo",
        "advantage": "group",
        "correction": "decoupled",
        "kl_estimator": "exact",
        "beta": BETA,
    },
}


@dataclass
class Update:
    """Taken down just before an update."""

    trained: Trained
    grads: Trained
    loss: float


@functools.lru_cache
def _forward(config: DecoderConfig):
    @jax.jit
    def run(params: Params, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = Decoder(config, params)
        hidden = model.hidden_states(rows)
        return model.head(hidden), hidden

    return run


@functools.lru_cache
def _pulled_back(config: DecoderConfig, scale: float | None):
    """Compiled (what is trained, start model, rows, slopes of the loss in the logits) → gradient."""

    def total(policy: Params, start: Params, rows: jax.Array, slopes: jax.Array) -> jax.Array:
        params = policy if scale is None else merge(start, policy, scale)
        return (Decoder(config, params)(rows) * slopes).sum()

    return jax.jit(jax.grad(total))


class Reference:
    """The batch as rows, and every formula written out; nothing of `ops` and `training` is used."""

    def __init__(self, config: DecoderConfig, start: Params, batch: TrainBatch, method: dict[str, Any]) -> None:
        self.config, self.start, self.batch, self.method = config, start, batch, method
        self.rows = np.zeros((16, PADDED), np.int32)
        self.steps: list[tuple[int, int, int]] = []  # (sample, place in its row, flat place) of each trained token
        for i in range(batch.num_samples):
            first = int(batch.starts[i])
            self.rows[i, : batch.lengths[i]] = batch.token_ids[first : batch.starts[i + 1]]
            self.steps += [(i, j, first + j) for j in range(1, batch.lengths[i]) if batch.mask[first + j]]
        self.sample, self.place, self.flat = np.array(self.steps).T
        self.target = self.rows[self.sample, self.place]
        self.temperature = batch.temperature[self.flat].astype(np.float64)
        self.sampler = batch.logprobs[self.flat].astype(np.float64)

    def params(self, policy: Params) -> Params:
        lora = self.method.get("lora")
        return policy if lora is None else merge(self.start, policy, lora["alpha"] / lora["rank"])

    def logits(self, params: Params) -> tuple[np.ndarray, np.ndarray]:
        """(logits [N,V], hidden states [N,H]) of the states that the trained tokens follow."""
        logits, hidden = (np.asarray(x, np.float64) for x in _forward(self.config)(params, self.rows))
        return logits[self.sample, self.place - 1], hidden[self.sample, self.place - 1]

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        scaled = logits / self.temperature[:, None]
        return scaled - np.log(np.exp(scaled).sum(1, keepdims=True))

    def chosen(self, logits: np.ndarray) -> np.ndarray:
        return self.distribution(logits)[np.arange(len(self.target)), self.target]

    def kl(self, logits: np.ndarray, start: np.ndarray, name: str) -> np.ndarray:
        p, q = self.distribution(logits), self.distribution(start)
        d = self.chosen(logits) - self.chosen(start)
        exact = (np.exp(p) * (p - q)).sum(1)
        return {"exact": exact, "k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[name]

    def kept(self, old: np.ndarray) -> np.ndarray:
        if self.method["correction"] != "masked":
            return np.ones(len(self.target), bool)
        weight = np.exp(self.chosen(old) - self.sampler)
        return (weight >= 1 / CAP) & (weight <= CAP)

    def advantages(
        self, old: np.ndarray, start: np.ndarray, values: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns) [N]."""
        name, reward = self.method["algorithm"], self.batch.reward.astype(np.float64)
        found, returns = np.zeros(len(self.target)), np.zeros(len(self.target))
        if name in ("reinforce_pp_baseline", "bnpo"):
            for i, group in enumerate(self.batch.group):
                members = np.concatenate(
                    [reward[self.batch.group == group], self.batch.peer_reward[self.batch.peer_group == group]]
                )
                std = 1.0 if name == "reinforce_pp_baseline" else members.std() + 1e-8
                found[self.sample == i] = (reward[i] - members.mean()) / std if np.ptp(members) > 0 else 0.0
        elif name == "rloo":
            taken = BETA * self.kl(old, start, "k1")
            lowered = np.array([r - taken[self.sample == i].sum() for i, r in enumerate(reward)])
            for i, group in enumerate(self.batch.group):
                others = (self.batch.group == group) & (np.arange(len(reward)) != i)
                apart = np.concatenate([lowered[others], self.batch.peer_reward[self.batch.peer_group == group]])
                found[self.sample == i] = lowered[i] - apart.mean()
        else:
            taken = BETA * self.kl(old, start, self.method.get("kl_estimator", "k1"))
            for i in range(self.batch.num_samples):
                mine = np.flatnonzero(self.sample == i)
                after = following = 0.0
                for t in mine[::-1]:
                    r = (reward[i] if t == mine[-1] else 0.0) - taken[t]
                    if values is None:
                        after = r + after
                    else:
                        after = r + GAMMA * following - values[t] + GAMMA * LAMBDA * after
                        following = values[t]
                        returns[t] = after + values[t]
                    found[t] = after
        if name in ("reinforce_pp", "reinforce_pp_baseline", "ppo"):
            kept = found[self.kept(old)]
            found = (found - kept.mean()) / kept.std()
        return found, returns

    def terms(self, logits: np.ndarray, old: np.ndarray, start: np.ndarray, advantage: np.ndarray) -> np.ndarray:
        """[N], the loss of each token; that of the batch is their mean over the kept ones."""
        loss = self.terms_of(self.chosen(logits), old, advantage)
        if self.method["algorithm"] in ("bnpo", "reinforce_pp_baseline"):
            loss = loss + BETA * self.kl(logits, start, self.method.get("kl_estimator", "k2"))
        return loss

    def terms_of(self, lp: np.ndarray, old: np.ndarray, advantage: np.ndarray) -> np.ndarray:
        """The part that needs no more than the log-probs of the tokens."""
        lp_old, name = self.chosen(old), self.method["algorithm"]
        off = np.exp(lp_old - self.sampler)
        against = self.sampler if self.method["correction"] == "none" else lp_old
        weight = {"none": np.ones_like(off), "truncated": np.minimum(off, CAP)}.get(self.method["correction"], off)
        ratio = np.exp(lp - against)
        clipped = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        if name == "rloo":  # one ratio an answer; the mean over answers of the weighted mean of its tokens' terms
            sums = np.array([(lp - against)[self.sample == i].sum() for i in range(self.batch.num_samples)])
            count = np.bincount(self.sample)
            ratio = np.exp(sums)[self.sample]
            clipped = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage) / count[self.sample]
            return -weight * clipped * len(lp) / (count > 0).sum()
        return -weight * (advantage * lp if name == "reinforce" else clipped)

    def slopes(self, logits: np.ndarray, old: np.ndarray, start: np.ndarray, advantage: np.ndarray) -> np.ndarray:
        """Central differences of the batch's loss in each logit, [rows, PADDED, V]; the terms of different tokens share none,
        but for rloo, which goes by the log-probs: −p/T of all logits, and 1/T of the token's own."""
        out, kept = np.zeros((*self.rows.shape, self.config.vocab_size), np.float32), self.kept(old)
        if self.method["algorithm"] == "rloo":
            chain = np.eye(self.config.vocab_size)[self.target] - np.exp(self.distribution(logits))
            for t in range(len(self.target)):
                step = 1e-5 * (np.arange(len(self.target)) == t)
                ends = [self.terms_of(self.chosen(logits) + s, old, advantage).mean() for s in (step, -step)]
                slope = (ends[0] - ends[1]) / 2e-5
                out[self.sample[t], self.place[t] - 1] = slope * chain[t] / self.temperature[t]
            return out
        for v in range(self.config.vocab_size):
            step = np.zeros_like(logits)
            step[:, v] = 1e-5
            slope = self.terms(logits + step, old, start, advantage) - self.terms(logits - step, old, start, advantage)
            out[self.sample, self.place - 1, v] = np.where(kept, slope / 2e-5, 0.0) / kept.sum()
        return out

    def values(self, head: Params, hidden: np.ndarray) -> np.ndarray:
        return hidden @ np.asarray(head["w"], np.float64) + float(head["b"])

    def check(self, trainer: PolicyTrainer, updates: list[Update]) -> None:
        """The gradients and losses of the updates, the first of which begins at the policy before the batch."""
        before, (start, _) = updates[0].trained, self.logits(self.start)
        old, hidden = self.logits(self.params(before.policy))
        values = None if before.critic is None else self.values(before.critic, hidden)
        advantage, returns = self.advantages(old, start, values)
        kept = self.kept(old)
        for update in updates:
            logits, hidden = self.logits(self.params(update.trained.policy))
            loss = self.terms(logits, old, start, advantage)[kept].mean()
            slopes = self.slopes(logits, old, start, advantage)
            lora = trainer.settings.lora
            pull = _pulled_back(self.config, None if lora is None else lora.scale)
            want = pull(update.trained.policy, self.start, self.rows, slopes)
            assert gap(update.grads.policy, want) < 1e-4
            if update.trained.critic is not None:
                error = self.values(update.trained.critic, hidden) - returns
                np.testing.assert_allclose(
                    update.grads.critic["w"], 2 * (error[kept, None] * hidden[kept]).mean(0), rtol=1e-3, atol=1e-4
                )
                assert float(update.grads.critic["b"]) == pytest.approx(2 * error[kept].mean(), rel=1e-3, abs=1e-4)
                loss += (error[kept] ** 2).mean()
            assert update.loss == pytest.approx(loss, rel=1e-3, abs=1e-4)


def gap(a: Any, b: Any) -> float:
    """Relative distance of two trees."""
    x, y = (np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def noisy(tree: Params, scale: float, seed: int) -> Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + np.float32(scale) * rng.normal(size=x.shape).astype(np.float32), tree)


def trainer_of(config: DecoderConfig, params: Params, method: dict[str, Any]) -> PolicyTrainer:
    """Away from the start model, and with a critic that says something."""
    settings = PolicySettings.from_method({"learning_rate": 0.02, "epochs": 2, **method})
    trainer = PolicyTrainer(config, params, settings)
    trainer.trainable = noisy(trainer.trainable, 0.1, 1)
    if trainer.critic is not None:
        trainer.critic = noisy(trainer.critic, 0.2, 2)
    return trainer


def batch_of(config: DecoderConfig, trainer: PolicyTrainer) -> TrainBatch:
    """Twelve samples in interleaved groups, some with members elsewhere, many of two turns, from a sampler that is off by some
    tenths."""
    samples, reward = standard_samples()
    batch = make_batch(samples, reward, temperature=TEMPERATURES, group=GROUPS)
    turns = (
        np.arange(len(batch.mask)) % 6 != 3
    )  # the rest of an answer is a second turn, after something that was not sampled
    batch = replace(batch, mask=batch.mask * turns.astype(np.uint8))
    rng = np.random.default_rng(5)
    off = trainer.score(batch) + rng.normal(size=len(batch.mask)).astype(np.float32) * 0.6
    peers = {"peer_reward": np.float32([0.7, -1.2]), "peer_group": np.int32([0, 3])}
    return replace(batch, logprobs=np.where(batch.mask > 0, off, 0).astype(np.float32), **peers)


def updates_of(
    trainer: PolicyTrainer, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Update], dict[str, float]]:
    taken: list[Update] = []
    honest = trainer._apply_gradients

    def apply(grads: Trained, loss: jax.Array) -> dict[str, float]:
        copied = jax.tree.map(np.array, (Trained(trainer.trainable, trainer.critic), grads))
        taken.append(Update(*copied, float(loss)))
        return honest(grads, loss)

    monkeypatch.setattr(trainer, "_apply_gradients", apply)
    report = trainer.train(batch)
    assert not report.skipped
    return taken, report.metrics


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_formulas(
    config: DecoderConfig, params: Params, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    check_case(config, params, monkeypatch, name)


def check_case(config: DecoderConfig, params: Params, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    method = {"correction": "truncated", **CASES[name]}
    trainer = trainer_of(config, params, method)
    start = trainer.state()
    batch = batch_of(config, trainer)
    reference = Reference(config, params, batch, method)
    updates, metrics = updates_of(trainer, batch, monkeypatch)
    assert len(updates) == 2
    reference.check(trainer, updates)
    if method["correction"] == "masked":
        kept = reference.kept(reference.logits(reference.params(start["trainable"]))[0])
        assert metrics["masked_token_fraction"] == pytest.approx(1 - kept.mean())
        assert 0.1 < kept.mean() < 0.9

    if name in ("ppo on an adapter", "exact KL"):
        # Cut into micro-batches and chunks, in another order: the same up to rounding.
        trainer.load_state(start)
        trainer.microbatch_tokens = 64
        monkeypatch.setattr(logprobs, "CHUNK", 16)
        again, _ = updates_of(trainer, batch.select(np.random.default_rng(1).permutation(12)), monkeypatch)
        assert gap(again[0].grads, updates[0].grads) < 1e-4
        assert (
            gap(again[1].grads, updates[1].grads) < 2e-2
        )  # Adam enlarges rounding where a gradient is next to nothing


MUTATIONS: list[tuple[ModuleType, str, str, str]] = [
    (policy_step, 'settings.is_cap if settings.correction == "truncated" else None', "None", "reinforce_pp_baseline"),
    (policy_step, 'settings.is_cap if settings.correction == "truncated" else None', "2.0", "reinforce"),
    (policy_step, 'behaviour if settings.correction == "none" else old', "old", "ppo"),
    (policy_step, "per_token + settings.beta * kl", "per_token - settings.beta * kl", "exact KL"),
    (policy_step, "jnp.sum(squared_error(*kept))", "0.5 * jnp.sum(squared_error(*kept))", "ppo"),
    (token_advantages, "rewards - settings.beta * steps", "rewards + settings.beta * steps", "reinforce"),
    (token_advantages, "rewards[scored] -= settings.beta", "rewards[scored] += settings.beta", "rloo"),
    (token_advantages, "rewards[scored] -= settings.beta * _sums(kl, batch.lengths[scored])", "pass", "rloo"),
    (token_advantages, "masked_normalize(found, inside)", "masked_normalize(found, steps.mask)", "reinforce_pp"),
    (token_advantages, "found + masked(values, steps.mask)", "found", "ppo"),
    (token_advantages, "critic.gamma, critic.gae_lambda", "critic.gae_lambda, critic.gamma", "ppo"),
    (token_advantages, "[rewards, batch.peer_reward]", "[rewards, 0 * batch.peer_reward]", "exact KL"),
    (policy_trainer, "np.where(batch.temperature > 0, batch.temperature, 1.0)", "np.ones_like(batch.temperature)", "rloo"),
    (policy_trainer, "num_tokens = int(layout.weight.sum())", "num_tokens = int(layout.num_tokens)", "reinforce"),
    (policy_trainer, "np.abs(shift) > np.log(cap)", "shift > np.log(cap)", "reinforce_pp"),
    (critic, 'hidden @ critic["w"] + critic["b"]', 'hidden @ critic["w"] - critic["b"]', "ppo"),
    (critic, "jax.lax.stop_gradient(hidden_NH)", "hidden_NH", "ppo"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "old", "new", "case"),
    [pytest.param(*m, id=str(i), marks=pytest.mark.soak if i else pytest.mark.ci) for i, m in enumerate(MUTATIONS)],
)
def test_altered_formulas_are_noticed(
    config: DecoderConfig,
    params: Params,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    old: str,
    new: str,
    case: str,
) -> None:
    with mutated(module, old, new), pytest.raises(AssertionError):
        check_case(config, params, monkeypatch, case)
