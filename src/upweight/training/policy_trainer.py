"""Trains a policy on batches of uploaded samples: version k → version k + 1.

Invariants:
* The same parameters, optimizer state and batch give the same bits (on one machine): layout, shapes and order depend on the
  batch and the settings alone.
* An update that is not finite changes nothing and still counts as a version.
* The parameters handed out by `policy_params` are never donated or changed in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from upweight.errors import TrainingError
from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.models.lora import init_adapter, merge
from upweight.ops.advantages import ADVANTAGES, group_stats
from upweight.ops.packing import PackedBatch, pack, power_bucket
from upweight.ops.policy_loss import AGGREGATIONS
from upweight.ops.samples import TrainBatch
from upweight.training.microbatches import split_rows
from upweight.training.optimizer import learning_rate, make_optimizer
from upweight.training.policy_step import Packed, make_apply, make_gradient, make_score
from upweight.training.settings import PolicySettings

MAX_ROW = 4096  # longest row that samples sharing a context are packed into
REMAT_TOKENS = 2048  # above this many tokens a micro-batch trades a second forward pass for its activations


ARRAYS = ("trainable", "optimizer_state")  # entries of a trainer's state that are trees of arrays


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What became of one batch."""

    version: int
    skipped: bool  # no update was applied because none was finite; parameters are what they were
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

    def state(self, *, copy: bool = True) -> dict[str, Any]:
        """What a later run needs to go on bit for bit, beside the start model and the settings.

        `trainable` and `optimizer_state` are trees of arrays, `version` and `updates` ints. Without `copy` the optimizer's
        arrays are those of the trainer, which the next `train` deletes.
        """
        trees = {"trainable": self.trainable, "optimizer_state": self.optimizer_state}
        if copy:
            trees = jax.tree.map(jnp.copy, trees)
        return {**trees, "version": self.version, "updates": self.updates}

    def load_state(self, state: Mapping[str, Any], *, copy: bool = True) -> None:
        """Takes over a copy of `state`; `TrainingError` naming the first array that this trainer has no place for.

        Without `copy` the arrays become the trainer's own: the caller must not use them again.
        """
        mine = self.state(copy=False)
        check_same_form({name: mine[name] for name in ARRAYS}, {name: state[name] for name in ARRAYS})
        take = functools.partial(jnp.array, copy=copy)
        trees = {name: jax.tree.map(lambda new, old: take(new, old.dtype), state[name], mine[name]) for name in ARRAYS}
        self.trainable, self.optimizer_state = trees["trainable"], trees["optimizer_state"]
        self.version, self.updates = int(state["version"]), int(state["updates"])

    @functools.lru_cache(maxsize=8)  # noqa: B019 - one trainer lives as long as its process
    def _gradient(self, num_samples: int, remat: bool) -> Callable[..., Any]:
        return make_gradient(self.config, self.settings, num_samples, remat=remat)

    def train(self, batch: TrainBatch) -> StepReport:
        """One version from one batch; never raises for what a sample holds. Metrics that are not finite are left out."""
        advantages, fates = self._advantages(batch)
        active = np.flatnonzero([fate in ("trained", "zero_advantage") for fate in fates])
        metrics = _batch_metrics(batch, advantages, fates) | {"update_skipped": 0.0}
        skipped = False
        regularised = self.settings.beta > 0 or self.settings.entropy_coeff > 0
        if "trained" in fates or (regularised and len(active)):
            step_metrics, skipped = self._update(batch.select(active), advantages[active])
            metrics |= step_metrics
        metrics = {name: value for name, value in metrics.items() if np.isfinite(value)}
        self.version += 1
        return StepReport(version=self.version, skipped=skipped, metrics=metrics, fates=fates)

    def score(self, batch: TrainBatch) -> np.ndarray:
        """Log-probs of the trained tokens under the present policy, as an update computes them.

        float32 at the flat places of the batch, NaN elsewhere.
        """
        return self._flat_scores(batch, np.arange(batch.num_samples), self.trainable, self._frozen)

    def _advantages(self, batch: TrainBatch) -> tuple[np.ndarray, list[str]]:
        settings = self.settings
        if settings.advantage == "given":
            advantages = batch.reward.astype(np.float32)
        else:
            rewards = np.concatenate([batch.reward, batch.peer_reward])
            groups = np.concatenate([batch.group, batch.peer_group])
            advantages = ADVANTAGES[settings.preset.advantage](rewards, groups)[: batch.num_samples]
        starts = batch.starts
        fates = []
        advantages = np.where(_unusable(batch), np.float32(np.nan), advantages)
        for i, advantage in enumerate(advantages):
            length = int(batch.lengths[i])
            ids = batch.token_ids[starts[i] : starts[i + 1]]
            if length > self.config.max_context or ((ids < 0) | (ids >= self.config.vocab_size)).any():
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
        reports: list[dict[str, float]] = []
        for _ in range(self.settings.epochs):
            for part in parts:
                report, logprobs = self._one_update(batch, advantages, part, old, reference)
                reports.append(report)
        metrics = _join_reports(reports, self.settings.epochs)
        skipped = metrics["update_skipped"] == 1.0
        # Of the weights before the first update, which are those that may have sampled.
        return metrics | _mismatch(batch, logprobs if old is None else old, self.version), skipped

    def _one_update(
        self,
        batch: TrainBatch,
        advantages: np.ndarray,
        part: np.ndarray,
        old: np.ndarray | None,
        reference: np.ndarray | None,
    ) -> tuple[dict[str, float], np.ndarray]:
        layout, pieces = self._pieces(batch, part, advantages, old, reference)
        total: Any = None
        sums: dict[str, Any] = {}
        logprobs = np.full(len(batch.token_ids), np.nan, np.float32)
        for rows, packed in pieces:
            gradient = self._gradient(power_bucket(batch.num_samples, 8), rows.tokens.size > REMAT_TOKENS)
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
        return report | {"packed_tokens": float(layout.num_tokens), "update_skipped": float(not applied)}, logprobs

    def _pieces(
        self,
        batch: TrainBatch,
        part: np.ndarray,
        advantages: np.ndarray,
        old: np.ndarray | None,
        reference: np.ndarray | None,
    ) -> tuple[PackedBatch, list[tuple[PackedBatch, Packed]]]:
        """Packs the samples `part` of the batch and cuts the rows into micro-batches; indices refer to the whole batch."""
        layout = pack(batch, only=part, max_row=min(MAX_ROW, self.microbatch_tokens))
        num_tokens = int(layout.weight.sum())
        num_sequences = len(np.unique(layout.sample[layout.weight > 0]))
        aggregation = AGGREGATIONS[self.settings.preset.aggregation]
        divisor = aggregation.divisor(num_tokens, num_sequences, self.settings.max_response_length)
        behaviour = _behaviour(batch)
        temperature = np.where(batch.temperature > 0, batch.temperature, 1.0).astype(np.float32)
        unknown = np.full(len(batch.token_ids), np.nan, np.float32)
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
                "temperature": temperature[rows.source],
                "advantage": advantages[rows.sample].astype(np.float32),
                "behaviour": behaviour[rows.source],
                "old": (unknown if old is None else old)[rows.source],
                "reference": (unknown if reference is None else reference)[rows.source],
                "divisor": np.float32(divisor),
                "num_trained": np.float32(max(num_tokens, 1)),
            }
            pieces.append((rows, Packed(**arrays)))
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
            assert self._start is not None
            return self._flat_scores(batch, everything, self._start, None)
        zero = jax.tree.map(jnp.zeros_like, self.trainable)
        return self._flat_scores(batch, everything, zero, self._start)


def _join_reports(reports: list[dict[str, float]], epochs: int) -> dict[str, float]:
    """One report of all updates of a batch: token counts of one pass, greatest of a maximum, last rate, else token means."""
    weights = [report["num_tokens"] for report in reports]
    joined = {}
    for name in reports[0]:
        values = [report[name] for report in reports]
        if name in ("num_tokens", "packed_tokens"):
            joined[name] = sum(values) / epochs
        elif name == "update_skipped":
            joined[name] = sum(values) / len(values)
        elif name.endswith("_max"):
            joined[name] = max(values)
        else:
            joined[name] = values[-1] if name == "learning_rate" else float(np.average(values, weights=weights))
    return joined


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


def _behaviour(batch: TrainBatch) -> np.ndarray:
    """Sampler log-probs on the trainer's support, NaN where unknown.

    Filters renormalise what the sampler reports; the trainer's softmax covers the whole vocabulary, so such tokens are
    compared by their raw log-probs, which are those of T = 1.
    """
    raw = np.where(np.isin(batch.temperature, (0.0, 1.0)), batch.raw_logprobs, np.nan)
    return np.where(batch.filtered > 0, raw, batch.logprobs).astype(np.float32)


def _unusable(batch: TrainBatch) -> np.ndarray:
    """bool [n]: samples with a trained token whose uploaded log-prob is not finite. They spoil the update, visibly."""
    bad = (batch.mask > 0) & ~np.isfinite(batch.logprobs) & ~(batch.filtered > 0)
    return np.bincount(np.repeat(np.arange(batch.num_samples), batch.lengths)[bad], minlength=batch.num_samples) > 0


def _mismatch(batch: TrainBatch, logprobs: np.ndarray, version: int) -> dict[str, float]:
    """|Δlog-prob| between sampler and trainer over tokens that this very version sampled; absent without such tokens.

    Samples that lived through a weight swap stand apart: their later tokens were drawn over keys and values of older weights.
    """
    on_policy = (batch.versions == version) & np.isfinite(logprobs)
    swapped = np.repeat(_versions_per_sample(batch) > 1, batch.lengths)
    gap = np.abs(logprobs - _behaviour(batch))
    plain, apart = (gap[on_policy & which & np.isfinite(gap)] for which in (~swapped, swapped))
    metrics = {"on_policy_tokens": float(len(plain))}
    if len(plain):
        metrics |= {"mismatch_max": float(plain.max()), "mismatch_mean": float(plain.mean())}
    if len(apart):
        metrics |= {"swapped_tokens": float(len(apart)), "mismatch_swapped_max": float(apart.max())}
    return metrics


def _versions_per_sample(batch: TrainBatch) -> np.ndarray:
    """int [n], how many weights versions drew each sample's tokens."""
    sample = np.repeat(np.arange(batch.num_samples), batch.lengths)
    drawn = batch.versions >= 0
    pairs = np.unique(np.stack([sample[drawn], batch.versions[drawn]]), axis=1)
    return np.bincount(pairs[0], minlength=batch.num_samples)


def _batch_metrics(batch: TrainBatch, advantages: np.ndarray, fates: list[str]) -> dict[str, float]:
    trained_tokens = np.diff(np.concatenate([[0], np.cumsum(batch.mask, dtype=np.int64)])[batch.starts])
    _, _, counts, flat = group_stats(batch.reward, batch.group)
    groups = len(np.unique(batch.group))
    zero_groups = len(np.unique(batch.group[flat & (counts > 1)]))
    return {
        "normalized_reward_mean": float(batch.reward.mean()),
        "advantage_std": float(advantages.std()) if np.isfinite(advantages).all() else math.nan,
        "response_length_mean": float(trained_tokens.mean()),
        "samples_trained": float(sum(fate == "trained" for fate in fates)),
        "groups": float(groups),
        "zero_variance_groups": float(zero_groups),
    }
