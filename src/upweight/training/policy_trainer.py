"""Trains a policy on batches of uploaded samples: version k → version k + 1.

Invariants:
* The same parameters, optimizer state and batch give the same bits (on one machine): layout, shapes and order depend on the
  batch and the settings alone.
* An update that is not finite changes nothing and still counts as a version.
* The parameters handed out by `policy_params` are never donated or changed in place.
* What an update is measured against (old log-probs, values, advantages) is fixed before the batch's first update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from upweight.errors import TrainingError
from upweight.models.config import DecoderConfig
from upweight.models.decoder import REMAT_TOKENS
from upweight.models.layers import Params
from upweight.models.lora import init_adapter, merge
from upweight.ops.packing import PackedBatch, pack, power_bucket
from upweight.ops.policy_loss import AGGREGATIONS
from upweight.ops.samples import TrainBatch
from upweight.training.apply import make_apply
from upweight.training.batch_metrics import (
    batch_metrics,
    behaviour_logprobs,
    critic_metrics,
    join_reports,
    mismatch,
    spread,
    unusable,
)
from upweight.training.critic import init_critic
from upweight.training.fates import fates_after, fates_before
from upweight.training.microbatches import split_rows
from upweight.training.optimizer import learning_rate, make_critic_optimizer, make_optimizer
from upweight.training.pieces import add_trees, stacked
from upweight.training.policy_step import Fixed, Packed, Trained, make_gradient, make_score
from upweight.training.settings import PolicySettings
from upweight.training.token_advantages import (
    PolicyNumbers,
    kl_of_reward,
    sample_advantages,
    token_advantages,
)

MAX_ROW = 4096  # longest row that samples sharing a context are packed into


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What became of one batch."""

    version: int
    skipped: bool  # no update was applied because none was finite; parameters are what they were
    metrics: dict[str, float]
    fates: list[str] = field(default_factory=list)


class Targets(NamedTuple):
    """What a batch is trained towards, at its flat places, float32 [T]; NaN where unknown."""

    advantages: np.ndarray
    old: np.ndarray | None = None  # None = the policy that is being updated
    reference: np.ndarray | None = None
    returns: np.ndarray | None = None


class PolicyTrainer:
    """GRPO family, REINFORCE family and PPO, on full parameters or a LoRA adapter.

    `params` is the start model; it stays untouched. With LoRA the trainable tree is the adapter, otherwise the parameters.
    """

    def __init__(
        self, config: DecoderConfig, params: Params, settings: PolicySettings, *, microbatch_tokens: int = 8192
    ) -> None:
        self.config = config
        self.settings = settings
        self.version = 0
        self.microbatch_tokens = microbatch_tokens
        self._start = params if settings.lora or settings.beta > 0 else None
        if settings.lora is None:
            self.trainable: Params = params
        else:
            key = jax.random.key(settings.seed)
            lora = settings.lora
            self.trainable = init_adapter(config, key, rank=lora.rank, targets=lora.targets)
        self.critic = init_critic(config.hidden_size) if settings.critic else None
        optimizer = make_optimizer(settings)
        self._rate = learning_rate(settings)
        self.optimizer_state = jax.jit(optimizer.init)(self.trainable)
        self._apply = make_apply(optimizer)
        if self.critic is not None:
            critic_optimizer = make_critic_optimizer(settings)
            self.critic_state = jax.jit(critic_optimizer.init)(self.critic)
            self._apply = make_apply(optimizer, critic_optimizer)
            self._apply_critic = make_apply(critic_optimizer)
        self._score = make_score(config, settings)
        self.updates = 0

    @property
    def _fixed(self) -> Fixed:
        """What log-probs of the present policy are computed from beside what is trained."""
        return Fixed(base=self._base if self.settings.lora else None)

    @functools.cached_property
    def _base(self) -> Params:
        """What is under the adapter, in the form that a gradient takes; it never changes."""
        assert self._start is not None
        return stacked(self._start)

    @property
    def _fixed_with_start(self) -> Fixed:
        """The same, with the start model where its whole distribution is asked for."""
        return self._fixed._replace(start=self._start if self.settings.exact_kl else None)

    @property
    def _warms_up(self) -> bool:
        """Whether the critic is trained alone."""
        return self.settings.critic is not None and self.version < self.settings.critic.warmup_batches

    def policy_params(self) -> Params:
        """The parameters that a plain forward pass needs to act as the present policy (adapter merged in, no critic)."""
        if self.settings.lora is None:
            return self.trainable
        return merge(self._start, self.trainable, self.settings.lora.scale)

    def state(self, *, copy: bool = True) -> dict[str, Any]:
        """What a later run needs to go on bit for bit, beside the start model and the settings.

        `trainable` and `optimizer_state`, with a critic also `critic` and `critic_state`, are trees of arrays, `version` and
        `updates` ints. Without `copy` the optimizers' arrays are those of the trainer, which the next `train` deletes.
        """
        trees = self._trees()
        if copy:
            trees = jax.tree.map(jnp.copy, trees)
        return {**trees, "version": self.version, "updates": self.updates}

    def _trees(self) -> dict[str, Any]:
        trees = {"trainable": self.trainable, "optimizer_state": self.optimizer_state}
        return trees if self.critic is None else {**trees, "critic": self.critic, "critic_state": self.critic_state}

    def load_state(self, state: Mapping[str, Any], *, copy: bool = True) -> None:
        """Takes over a copy of `state`; `TrainingError` naming the first array that this trainer has no place for.

        Without `copy` the arrays become the trainer's own: the caller must not use them again.
        """
        mine = self._trees()
        given = {name: tree for name, tree in state.items() if name not in ("version", "updates")}
        check_same_form(mine, given)
        take = functools.partial(jnp.array, copy=copy)
        for name, tree in mine.items():
            setattr(self, name, jax.tree.map(lambda new, old: take(new, old.dtype), given[name], tree))
        self.version, self.updates = int(state["version"]), int(state["updates"])

    @functools.lru_cache(maxsize=8)  # noqa: B019 - one trainer lives as long as its process
    def _gradient(self, num_samples: int, remat: bool) -> Callable[..., Any]:
        return make_gradient(self.config, self.settings, num_samples, remat=remat)

    def train(self, batch: TrainBatch) -> StepReport:
        """One version from one batch; never raises for what a sample holds. Metrics that are not finite are left out."""
        limits = {"max_context": self.config.max_context, "vocab_size": self.config.vocab_size}
        before = fates_before(self.settings, batch, **limits)
        active = np.flatnonzero([fate is None for fate in before])
        chosen = batch.select(active)
        chosen = replace(chosen, mask=chosen.targets)
        numbers = self._numbers_before(chosen) if chosen.mask.any() else PolicyNumbers()
        kl = kl_of_reward(self.settings, chosen, numbers)
        compared = sample_advantages(self.settings, batch, active, kl)
        advantages = np.where(unusable(batch), np.float32(np.nan), compared.advantages)
        left_out = compared.flat[active] & self.settings.preset.filter_flat_groups
        chosen = replace(chosen, mask=chosen.mask * ~np.repeat(left_out, chosen.lengths))
        chosen, targets, metrics = self._targets(chosen, advantages[active], numbers, kl)
        found = fates_after(self.settings, chosen, targets.advantages, left_out)
        after = dict(zip(active.tolist(), found, strict=True))
        fates = [after[i] if fate is None else fate for i, fate in enumerate(before)]
        metrics = batch_metrics(batch, advantages, fates) | metrics | {"update_skipped": 0.0}
        skipped = False
        regularised = self.settings.kl_in_loss or self.settings.entropy_coeff > 0
        if "trained" in fates or (regularised and chosen.mask.any()):
            step_metrics, skipped = self._update(chosen, targets)
            metrics |= step_metrics
        metrics = {name: value for name, value in metrics.items() if np.isfinite(value)}
        self.version += 1
        return StepReport(version=self.version, skipped=skipped, metrics=metrics, fates=fates)

    def score(self, batch: TrainBatch) -> np.ndarray:
        """Log-probs of the trained tokens under the present policy, as an update computes them.

        float32 at the flat places of the batch, NaN elsewhere.
        """
        scores = self._scores(batch, Trained(self.trainable, self.critic), self._fixed)
        assert scores.logprobs is not None
        return scores.logprobs

    def _targets(
        self, batch: TrainBatch, per_sample: np.ndarray, before: PolicyNumbers, kl: np.ndarray | None
    ) -> tuple[TrainBatch, Targets, dict[str, float]]:
        """The batch with the mask of what enters the loss, what it is trained towards, and metrics of both."""
        settings = self.settings
        if not batch.mask.any():
            return batch, Targets(np.repeat(per_sample, batch.lengths)), {}
        kept, metrics = batch.mask, {}
        if settings.correction == "masked":
            assert before.logprobs is not None
            kept = _inside_band(batch, before.logprobs, settings.is_cap)
            metrics["masked_token_fraction"] = 1.0 - float(kept.sum()) / float(batch.mask.sum())
        found = token_advantages(settings, batch, per_sample, kept, before, kl)
        if found.returns is not None:
            assert before.values is not None
            metrics |= critic_metrics(before.values, found.returns, kept)
        if settings.makes_advantages and kept.any():
            metrics["advantage_std"] = spread(found.advantages[kept > 0])
        if kl is not None:
            metrics["kl"] = float(kl[batch.mask > 0].mean())
        targets = Targets(found.advantages, before.logprobs, before.reference, found.returns)
        return replace(batch, mask=kept), targets, metrics

    def _numbers_before(self, batch: TrainBatch) -> PolicyNumbers:
        """What the settings need of the policy before the batch's first update; with one update, often nothing."""
        settings = self.settings
        several = settings.epochs > 1 or len(_minibatches(batch.num_samples, settings.minibatch_size)) > 1
        numbers = PolicyNumbers()
        if several or settings.correction == "masked" or settings.kl_in_reward or settings.critic:
            fixed = self._fixed_with_start if settings.kl_in_reward else self._fixed
            numbers = self._scores(batch, Trained(self.trainable, self.critic), fixed)
        if settings.beta > 0 and not settings.exact_kl:
            numbers = numbers._replace(reference=self._reference_scores(batch))
        return numbers

    def _update(self, batch: TrainBatch, targets: Targets) -> tuple[dict[str, float], bool]:
        reports: list[dict[str, float]] = []
        sample = np.repeat(np.arange(batch.num_samples), batch.lengths)
        live = np.bincount(sample, batch.mask, minlength=batch.num_samples) > 0
        parts = [part for part in _minibatches(batch.num_samples, self.settings.minibatch_size) if live[part].any()]
        for _ in range(self.settings.epochs):
            for part in parts:
                report, logprobs = self._one_update(batch, part, targets)
                reports.append(report)
        metrics = join_reports(reports, self.settings.epochs)
        skipped = metrics["update_skipped"] == 1.0
        # Of the weights before the first update, which are those that may have sampled.
        return metrics | mismatch(batch, logprobs if targets.old is None else targets.old, self.version), skipped

    def _one_update(self, batch: TrainBatch, part: np.ndarray, targets: Targets) -> tuple[dict[str, float], np.ndarray]:
        layout, pieces = self._pieces(batch, part, targets)
        fixed = self._fixed_with_start if self.settings.kl_in_loss else self._fixed
        total: Any = None
        sums: dict[str, Any] = {}
        logprobs = np.full(len(batch.token_ids), np.nan, np.float32)
        for rows, packed in pieces:
            gradient = self._gradient(power_bucket(batch.num_samples, 8), rows.tokens.size > REMAT_TOKENS)
            grads, metrics, lp = gradient(Trained(self.trainable, self.critic), fixed, packed)
            total = grads if total is None else add_trees(total, grads)
            for name, value in metrics.items():
                before = sums.get(name)
                join = jnp.maximum if name.endswith("_max") else jnp.add
                sums[name] = value if before is None else join(before, value)
            real = rows.weight > 0
            logprobs[rows.source[real]] = np.asarray(lp)[real]
        report = self._apply_gradients(total, sums["loss"] + sums.get("value_loss", 0.0))
        report |= {name: float(value) for name, value in sums.items()}
        report |= {"num_tokens": float(layout.weight.sum()), "packed_tokens": float(layout.num_tokens)}
        return report, logprobs

    def _apply_gradients(self, grads: Trained, loss: jax.Array) -> dict[str, float]:
        """Moves what is to be trained now, if loss and gradients are finite."""
        if self.critic is None:
            (self.trainable,), (self.optimizer_state,), norms, applied = self._apply(
                (self.trainable,), (self.optimizer_state,), (grads.policy,), loss
            )
        elif self._warms_up:
            (self.critic,), (self.critic_state,), norms, applied = self._apply_critic(
                (self.critic,), (self.critic_state,), (grads.critic,), loss
            )
            return {"critic_grad_norm": float(norms[0]), "update_skipped": float(not applied)}
        else:
            trees, states, norms, applied = self._apply(
                (self.trainable, self.critic), (self.optimizer_state, self.critic_state), tuple(grads), loss
            )
            (self.trainable, self.critic), (self.optimizer_state, self.critic_state) = trees, states
        rate = float(self._rate(self.updates))
        self.updates += int(applied)
        names = ("grad_norm", "critic_grad_norm")
        report = {name: float(norm) for name, norm in zip(names, norms, strict=False)}
        return report | {"learning_rate": rate, "update_skipped": float(not applied)}

    def _pieces(
        self, batch: TrainBatch, part: np.ndarray, targets: Targets
    ) -> tuple[PackedBatch, list[tuple[PackedBatch, Packed]]]:
        """Packs the samples `part` of the batch and cuts the rows into micro-batches; indices refer to the whole batch."""
        layout = pack(batch, only=part, max_row=min(MAX_ROW, self.microbatch_tokens))
        num_tokens = int(layout.weight.sum())
        num_sequences = len(np.unique(layout.sample[layout.weight > 0]))
        aggregation = AGGREGATIONS[self.settings.preset.aggregation]
        divisor = aggregation.divisor(num_tokens, num_sequences, self.settings.max_response_length)
        unknown = np.full(len(batch.token_ids), np.nan, np.float32)
        per_token = {
            "temperature": np.where(batch.temperature > 0, batch.temperature, 1.0).astype(np.float32),
            "advantage": targets.advantages.astype(np.float32),
            "behaviour": behaviour_logprobs(batch),
            "old": targets.old,
            "reference": targets.reference,
            "returns": targets.returns,
        }
        pieces = []
        for rows in split_rows(layout, self.microbatch_tokens):
            arrays: dict[str, Any] = {
                "tokens": rows.tokens,
                "positions": rows.positions,
                "block": rows.block,
                "segment": rows.segment,
                "query": rows.query,
                "target": rows.target,
                "sample": rows.sample,
                "trained": rows.weight,
                "divisor": np.float32(divisor),
                "num_trained": np.float32(max(num_tokens, 1)),
            }
            arrays |= {name: (unknown if flat is None else flat)[rows.source] for name, flat in per_token.items()}
            pieces.append((rows, Packed(**arrays)))
        return layout, pieces

    def _scores(self, batch: TrainBatch, trained: Trained, fixed: Fixed) -> PolicyNumbers:
        """Scores of the trained tokens at the flat places of the batch, NaN elsewhere; no reference."""
        total = len(batch.token_ids)
        found: dict[str, np.ndarray] = {}
        everything = np.arange(batch.num_samples)
        _, pieces = self._pieces(batch, everything, Targets(np.zeros(total, np.float32)))
        for rows, packed in pieces:
            scores, real = self._score(trained, fixed, packed), rows.weight > 0
            for name, values in (("logprobs", scores.logprob), ("kl", scores.kl), ("values", scores.value)):
                if values is not None:
                    flat = found.setdefault(name, np.full(total, np.nan, np.float32))
                    flat[rows.source[real]] = np.asarray(values)[real]
        return PolicyNumbers(**found)

    def _reference_scores(self, batch: TrainBatch) -> np.ndarray:
        """Log-probs under the start model; with LoRA that is the base with a zero adapter."""
        policy = self._start if self.settings.lora is None else jax.tree.map(jnp.zeros_like, self.trainable)
        assert policy is not None
        # With the critic, whose values nobody reads, it is the program that scored the policy.
        scores = self._scores(batch, Trained(policy, self.critic), self._fixed)
        assert scores.logprobs is not None
        return scores.logprobs


def check_same_form(mine: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """`TrainingError` naming the first array of a state whose path or shape is not the trainer's."""
    wanted, found = (
        {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (mine, given)
    )
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise TrainingError(
                f"state{name} has shape {found.get(name, 'none')}, the trainer needs {wanted.get(name, 'none')}: "
                "build the trainer with the model and settings that the state was saved with"
            )


def _minibatches(count: int, size: int | None) -> list[np.ndarray]:
    order = np.arange(count)
    return [order] if not size or size >= count else [order[i : i + size] for i in range(0, count, size)]


def _inside_band(batch: TrainBatch, logprobs: np.ndarray, cap: float) -> np.ndarray:
    """uint8 [T]: trained tokens with π_old/π_sampler in [1/cap, cap]; those of an unknown sampler stay."""
    shift = logprobs - behaviour_logprobs(batch)
    outside = np.abs(shift) > np.log(cap)  # False for NaN
    return (batch.mask * ~outside).astype(np.uint8)
