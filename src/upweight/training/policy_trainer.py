"""Trains a policy on batches of uploaded samples: version k → version k + 1.

Invariants:
* The same parameters, optimizer state and batch give the same bits (on one machine): layout, shapes and order depend on the
  batch and the settings alone.
* An update that is not finite changes nothing and still counts as a version.
* The parameters handed out by `policy_params` are never donated or changed in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.models.lora import init_adapter, merge
from upweight.ops.advantages import ADVANTAGES, group_stats
from upweight.ops.packing import PackedBatch, pack
from upweight.ops.policy_loss import AGGREGATIONS
from upweight.ops.samples import TrainBatch
from upweight.training.microbatches import split_rows
from upweight.training.optimizer import learning_rate, make_optimizer
from upweight.training.policy_step import Packed, make_apply, make_gradient, make_score
from upweight.training.settings import PolicySettings

REMAT_TOKENS = 2048  # above this many tokens a micro-batch trades a second forward pass for its activations


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What became of one batch."""

    version: int
    skipped: bool
    metrics: dict[str, float]
    fates: list[str] = field(default_factory=list)


class PolicyTrainer:
    """GRPO family on full parameters or a LoRA adapter.

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
        self._optimizer = make_optimizer(settings)
        self._rate = learning_rate(settings)
        self.optimizer_state = jax.jit(self._optimizer.init)(self.trainable)
        self._apply = make_apply(self._optimizer)
        self._score = make_score(config, settings)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self.updates = 0

    @property
    def _frozen(self) -> Params | None:
        return self._start if self.settings.lora else None

    def policy_params(self) -> Params:
        """The parameters that a plain forward pass needs to act as the present policy (adapter merged in)."""
        if self.settings.lora is None:
            return self.trainable
        return merge(self._start, self.trainable, self.settings.lora.scale)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - one trainer lives as long as its process
    def _gradient(self, num_samples: int, remat: bool) -> Callable[..., Any]:
        return make_gradient(self.config, self.settings, num_samples, remat=remat)

    def train(self, batch: TrainBatch) -> StepReport:
        """One version from one batch; never raises for what a sample holds."""
        advantages, fates = self._advantages(batch)
        active = np.flatnonzero([fate in ("trained", "zero_advantage") for fate in fates])
        metrics = _batch_metrics(batch, advantages, fates)
        skipped = False
        if "trained" in fates or (self.settings.beta > 0 and len(active)):
            step_metrics, skipped = self._update(batch.select(active), advantages[active])
            metrics |= step_metrics
        metrics["update_skipped"] = float(skipped)
        self.version += 1
        return StepReport(version=self.version, skipped=skipped, metrics=metrics, fates=fates)

    def _advantages(self, batch: TrainBatch) -> tuple[np.ndarray, list[str]]:
        settings = self.settings
        if settings.advantage == "given":
            advantages = batch.reward.astype(np.float32)
        else:
            advantages = ADVANTAGES[settings.preset.advantage](batch.reward, batch.group)
        starts = batch.starts
        fates = []
        for i, advantage in enumerate(advantages):
            length = int(batch.lengths[i])
            if length > self.config.max_context:
                fates.append("refused")
            elif not batch.mask[starts[i] + 1 : starts[i + 1]].any():
                fates.append("masked")
            else:
                fates.append("trained" if advantage != 0 else "zero_advantage")
        return advantages, fates

    def _update(self, batch: TrainBatch, advantages: np.ndarray) -> tuple[dict[str, float], bool]:
        parts = _minibatches(batch.num_samples, self.settings.minibatch_size)
        several = self.settings.epochs > 1 or len(parts) > 1
        everything = np.arange(batch.num_samples)
        old = self._flat_scores(batch, everything, self.trainable, self._frozen) if several else None
        reference = self._reference_scores(batch) if self.settings.beta > 0 else None
        metrics: dict[str, float] = {}
        skipped = False
        for epoch in range(self.settings.epochs):
            for part in parts:
                report, was_skipped = self._one_update(batch, advantages, part, old, reference)
                skipped |= was_skipped
                metrics = metrics or report if epoch == 0 else {**metrics, "loss": report["loss"]}
        return metrics, skipped

    def _one_update(
        self,
        batch: TrainBatch,
        advantages: np.ndarray,
        part: np.ndarray,
        old: np.ndarray | None,
        reference: np.ndarray | None,
    ) -> tuple[dict[str, float], bool]:
        layout, pieces = self._pieces(batch, part, advantages, old, reference)
        total: Any = None
        sums: dict[str, Any] = {}
        logprobs = np.full(len(batch.token_ids), np.nan, np.float32)
        for rows, packed in pieces:
            gradient = self._gradient(batch.num_samples, rows.tokens.size > REMAT_TOKENS)
            grads, metrics, lp = gradient(self.trainable, self._frozen, packed)
            total = grads if total is None else self._add(total, grads)
            for name, value in metrics.items():
                before = sums.get(name)
                join = jnp.maximum if name.endswith("_max") else jnp.add
                sums[name] = value if before is None else join(before, value)
            real = rows.weight > 0
            logprobs[rows.source[real]] = np.asarray(lp)[real]
        rate = float(self._rate(self.updates))
        new, self.optimizer_state, norm, applied = self._apply(
            self.trainable, self.optimizer_state, total, sums["loss"]
        )
        self.trainable = new
        self.updates += int(applied)
        report = {name: float(value) for name, value in sums.items()}
        report |= {"grad_norm": float(norm), "learning_rate": rate, "num_tokens": float(layout.weight.sum())}
        report |= {"packed_tokens": float(layout.num_tokens)}
        return report | _mismatch(batch, logprobs, self.version), not bool(applied)

    def _pieces(
        self,
        batch: TrainBatch,
        part: np.ndarray,
        advantages: np.ndarray,
        old: np.ndarray | None,
        reference: np.ndarray | None,
    ) -> tuple[PackedBatch, list[tuple[PackedBatch, Packed]]]:
        """Packs the samples `part` of the batch and cuts the rows into micro-batches; indices refer to the whole batch."""
        layout = pack(batch, only=part)
        num_tokens = int(layout.weight.sum())
        num_sequences = len(np.unique(layout.sample[layout.weight > 0]))
        aggregation = AGGREGATIONS[self.settings.preset.aggregation]
        divisor = aggregation.divisor(num_tokens, num_sequences, self.settings.max_response_length)
        behaviour = _behaviour(batch)
        temperature = np.where(batch.temperature > 0, batch.temperature, 1.0).astype(np.float32)
        unknown = np.full(len(batch.token_ids), np.nan, np.float32)
        pieces = []
        for rows in split_rows(layout, self.microbatch_tokens):
            packed = Packed(
                tokens=rows.tokens,
                positions=rows.positions,
                block=rows.block,
                segment=rows.segment,
                query=rows.query,
                target=rows.target,
                sample=rows.sample,
                trained=rows.weight,
                temperature=temperature[rows.sample],
                advantage=advantages[rows.sample].astype(np.float32),
                behaviour=behaviour[rows.source],
                old=(unknown if old is None else old)[rows.source],
                reference=(unknown if reference is None else reference)[rows.source],
                divisor=np.float32(divisor),
                num_trained=np.float32(max(num_tokens, 1)),
            )
            pieces.append((rows, packed))
        return layout, pieces

    def _flat_scores(self, batch: TrainBatch, part: np.ndarray, trainable: Params, frozen: Params | None) -> np.ndarray:
        """Log-probs of the trained tokens at the flat places of the batch, NaN elsewhere."""
        flat = np.full(len(batch.token_ids), np.nan, np.float32)
        _, pieces = self._pieces(batch, part, np.zeros(batch.num_samples), None, None)
        for rows, packed in pieces:
            lp = np.asarray(self._score(trainable, frozen, packed))
            real = rows.weight > 0
            flat[rows.source[real]] = lp[real]
        return flat

    def _reference_scores(self, batch: TrainBatch) -> np.ndarray:
        """Log-probs under the start model; with LoRA that is the base with a zero adapter."""
        everything = np.arange(batch.num_samples)
        if self.settings.lora is None:
            return self._flat_scores(batch, everything, self._start, None)
        zero = jax.tree.map(jnp.zeros_like, self.trainable)
        return self._flat_scores(batch, everything, zero, self._start)


def _minibatches(count: int, size: int | None) -> list[np.ndarray]:
    order = np.arange(count)
    return [order] if not size or size >= count else [order[i : i + size] for i in range(0, count, size)]


def _behaviour(batch: TrainBatch) -> np.ndarray:
    """Sampler log-probs on the trainer's support, NaN where unknown.

    Filters renormalise what the sampler reports; the trainer's softmax covers the whole vocabulary, so such samples are
    compared by their raw log-probs, which are those of T = 1.
    """
    filtered = np.repeat(batch.filtered.astype(bool), batch.lengths)
    at_one = np.repeat(np.isin(batch.temperature, (0.0, 1.0)), batch.lengths)
    raw = np.where(at_one, batch.raw_logprobs, np.nan)
    return np.where(filtered, raw, batch.logprobs).astype(np.float32)


def _mismatch(batch: TrainBatch, logprobs: np.ndarray, version: int) -> dict[str, float]:
    """|Δlog-prob| between sampler and trainer over tokens that this very version sampled; absent without such tokens."""
    on_policy = (batch.versions == version) & np.isfinite(logprobs)
    gap = np.abs(logprobs - _behaviour(batch))[on_policy]
    gap = gap[np.isfinite(gap)]
    metrics = {"on_policy_tokens": float(len(gap))}
    if len(gap):
        metrics |= {"mismatch_max": float(gap.max()), "mismatch_mean": float(gap.mean())}
    return metrics


def _batch_metrics(batch: TrainBatch, advantages: np.ndarray, fates: list[str]) -> dict[str, float]:
    trained_tokens = np.add.reduceat(batch.mask.astype(np.int64), batch.starts[:-1])
    _, _, counts, flat = group_stats(batch.reward, batch.group)
    groups = len(np.unique(batch.group))
    zero_groups = len(np.unique(batch.group[flat & (counts > 1)]))
    return {
        "normalized_reward_mean": float(batch.reward.mean()),
        "advantage_std": float(advantages.std()),
        "response_length_mean": float(trained_tokens.mean()),
        "samples_trained": float(sum(fate == "trained" for fate in fates)),
        "groups": float(groups),
        "zero_variance_groups": float(zero_groups),
    }
