"""Trainers of jobs that have a file: version k → version k + 1 on batch k of the file's rows.

Invariants (beside those of `PolicyTrainer`, whose state they have):
* Batch k, its layout and every reference score in it depend on rows, settings and start model alone, so that a run that goes on
  from a checkpoint computes the same bits as one that was never stopped.
* The trained tokens (or pairs) of the whole batch are the divisor, however it is cut into micro-batches.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from upweight.models.config import DecoderConfig
from upweight.models.decoder import REMAT_TOKENS
from upweight.models.layers import Params
from upweight.ops.logprobs import Scores
from upweight.ops.packing import PackedBatch, pack, pack_apart, power_bucket
from upweight.ops.preference_loss import PAIR_LOSSES, PairSettings
from upweight.training.lora_dropout import key_of
from upweight.training.microbatches import split_rows
from upweight.training.pieces import add_trees
from upweight.training.policy_trainer import MAX_ROW, PolicyTrainer, StepReport
from upweight.training.row_steps import (
    Gradient,
    Layout,
    Pairs,
    Supervision,
    make_preference_gradient,
    make_row_score,
    make_supervised_gradient,
    scores_are_means,
)
from upweight.training.rows import Plan, TrainRow, end_to_end
from upweight.training.settings import LoraSettings, PolicySettings

OPTIMIZER = ("learning_rate", "lr_schedule", "warmup_steps", "weight_decay", "max_grad_norm", "adam_b1", "adam_b2")
FEWEST_PAIRS = 4  # places for pairs that a compiled step has at least


def optimizer_settings(job: Mapping[str, Any]) -> PolicySettings:
    """Of the settings of a job that trains on a file: what makes and updates its parameters."""
    lora = job.get("lora")
    return PolicySettings(
        **{name: job[name] for name in OPTIMIZER},
        batch_size=job["batch_size"],
        total_steps=job["num_batches"],
        lora=LoraSettings(**lora) if lora else None,
        seed=job["seed"],
    )


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """The loss of a dpo job."""

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    length_normalized: bool = False

    @property
    def pair(self) -> PairSettings:
        return PairSettings(beta=self.beta, smoothing=self.label_smoothing)

    @property
    def means(self) -> bool:
        return scores_are_means(self.loss_type, self.length_normalized)

    @property
    def needs_reference(self) -> bool:
        return self.loss_type != "simpo"


class RowTrainer(PolicyTrainer):
    """What both kinds share: which rows come next, and one update from their pieces."""

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        settings: PolicySettings,
        rows: Sequence[TrainRow],
        *,
        microbatch_tokens: int = 8192,
    ) -> None:
        super().__init__(config, params, settings, microbatch_tokens=microbatch_tokens)
        self.rows = rows
        self.plan = Plan(rows=len(rows), batch_size=settings.batch_size or 1, seed=settings.seed)
        self.held_out: list[TrainRow] = []
        self._is_measured: Callable[[int], bool] = lambda version: False
        self._row_score: Callable[..., Scores] = make_row_score(config, settings)

    def validate_with(self, rows: Sequence[TrainRow], when: Callable[[int], bool]) -> None:
        """Measure the versions that `when` names on rows that are not trained on: metrics `valid_…`."""
        self.held_out, self._is_measured = [row for row in rows if row.usable], when

    def train_next(self) -> StepReport:
        """One version from the next batch of rows."""
        chosen = [int(number) for number in self.plan.batch(self.version)]
        usable = [number for number in chosen if self.rows[number].usable]
        fates = ["trained" if self.rows[number].usable else "masked" for number in chosen]
        metrics = {
            "samples": float(len(chosen)),
            "samples_trained": float(len(usable)),
            "samples_masked": float(len(chosen) - len(usable)),
            "epoch": float(self.version // self.plan.batches_per_epoch),
            "num_tokens": 0.0,
            "update_skipped": 0.0,
        }
        if usable:
            metrics |= self._update_on(usable)
        metrics["trained_tokens"] = metrics["num_tokens"]
        if self._is_measured(self.version + 1):
            metrics |= self._measured(self.held_out)
        metrics = {name: value for name, value in metrics.items() if np.isfinite(value)}
        self.version += 1
        skipped = metrics["update_skipped"] == 1.0
        return StepReport(version=self.version, skipped=skipped, metrics=metrics, fates=fates)

    @abstractmethod
    def _row_pieces(self, chosen: list[int]) -> Iterator[tuple[PackedBatch, Any]]:
        """Micro-batches of the rows, each with what its gradient takes besides."""

    @abstractmethod
    def _row_gradient(self, remat: bool) -> Gradient: ...

    @abstractmethod
    def _measured(self, rows: list[TrainRow]) -> dict[str, float]:
        """Metrics of the present version on rows."""

    def _update_on(self, chosen: list[int]) -> dict[str, float]:
        total: Any = None
        sums: dict[str, Any] = {}
        counts = {"num_tokens": 0.0, "packed_tokens": 0.0}
        for packed, more in self._row_pieces(chosen):
            gradient = self._row_gradient(packed.tokens.size > REMAT_TOKENS)
            grads, metrics = gradient(self.trainable, self._fixed.base, layout_of(packed), more)
            total = grads if total is None else add_trees(total, grads)
            sums = metrics if not sums else {name: sums[name] + value for name, value in metrics.items()}
            counts["num_tokens"] += float(packed.weight.sum())
            counts["packed_tokens"] += float(packed.num_tokens)
        (self.trainable,), (self.optimizer_state,), (norm,), applied = self._apply(
            (self.trainable,), (self.optimizer_state,), (total,), sums["loss"]
        )
        rate = float(self._rate(self.updates))
        self.updates += int(applied)
        report = {name: float(value) for name, value in sums.items()} | counts
        return report | {"grad_norm": float(norm), "learning_rate": rate, "update_skipped": float(not applied)}


class SupervisedTrainer(RowTrainer):
    """Cross-entropy of the trained tokens, their mean over the batch.

    `lora_dropout` in [0, 1] is for the inputs of an adapter, in updates alone; metrics of an update are those with it.
    """

    def __init__(self, *arguments: Any, share_rows: bool = True, lora_dropout: float = 0.0, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.share_rows = share_rows
        self.lora_dropout = lora_dropout

    @functools.lru_cache(maxsize=2)  # noqa: B019 - one trainer lives as long as its process
    def _row_gradient(self, remat: bool) -> Gradient:
        return make_supervised_gradient(self.config, self.settings, remat=remat, lora_dropout=self.lora_dropout)

    def _measured(self, rows: list[TrainRow]) -> dict[str, float]:
        loss, right, count = 0.0, 0.0, 0.0
        for packed in self._pieces_of(rows):
            found, weight = self._row_score(self.trainable, self._fixed.base, layout_of(packed)), packed.weight
            loss -= float(np.asarray(found.logprob, np.float64)[weight > 0].sum())
            right += float(np.asarray(found.hit, np.float64)[weight > 0].sum())
            count += float(weight.sum())
        return {"valid_loss": loss / count, "valid_token_accuracy": right / count}

    def _row_pieces(self, chosen: list[int]) -> Iterator[tuple[PackedBatch, Any]]:
        pieces = self._pieces_of([self.rows[number] for number in chosen])
        num_tokens: Any = np.float32(sum(piece.weight.sum() for piece in pieces))
        for number, piece in enumerate(pieces):
            yield piece, Supervision(num_tokens, key_of(self.settings.seed, self.version, number))

    def _pieces_of(self, rows: list[TrainRow]) -> list[PackedBatch]:
        batch, _ = end_to_end(rows)
        layout = pack if self.share_rows else pack_apart
        packed = layout(batch, max_row=min(MAX_ROW, self.microbatch_tokens))
        return list(split_rows(packed, self.microbatch_tokens))


class PreferenceTrainer(RowTrainer):
    """DPO and its relatives against the start model, whose scores are computed once a row."""

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        settings: PolicySettings,
        rows: Sequence[TrainRow],
        *,
        preference: PreferenceSettings,
        microbatch_tokens: int = 8192,
    ) -> None:
        super().__init__(config, params, settings, rows, microbatch_tokens=microbatch_tokens)
        self.preference = preference
        self._start = params if settings.lora or preference.needs_reference else None
        self._references: dict[int, np.ndarray] = {}  # row → float32 [2]
        self._held_out_reference: np.ndarray | None = None

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as above
    def _row_gradient(self, remat: bool) -> Gradient:
        kind = self.preference
        return make_preference_gradient(
            self.config, self.settings, kind.loss_type, kind.pair, means=kind.means, remat=remat
        )

    def _row_pieces(self, chosen: list[int]) -> Iterator[tuple[PackedBatch, Any]]:
        references = self.references(chosen)
        for some, packed, slot in self._packed_pairs([self.rows[number] for number in chosen]):
            places = power_bucket(len(some), FEWEST_PAIRS)
            targets = np.bincount(slot, packed.weight, minlength=2 * places).astype(np.float32)
            reference, weight = np.zeros(2 * places, np.float32), np.zeros(places, np.float32)
            reference[: 2 * len(some)] = np.concatenate([references[chosen[place]] for place in some])
            weight[: len(some)] = 1.0
            arrays: dict[str, Any] = {"slot": slot, "targets": targets, "reference": reference, "weight": weight}
            yield packed, Pairs(**arrays, num_pairs=np.float32(len(chosen)))  # type: ignore[arg-type]

    def references(self, chosen: Sequence[int]) -> dict[int, np.ndarray]:
        """Scores (preferred, other) of each row under the start model; zeros where the loss has no reference.

        A row is always scored together with the batch of the first epoch that it belongs to: in other company the
        last bits of its score might differ.
        """
        if not self.preference.needs_reference:
            return dict.fromkeys(chosen, np.zeros(2, np.float32))
        missing = [number for number in chosen if number not in self._references]
        if missing:
            order, size = self.plan.epoch_order(0), self.plan.batch_size
            place = np.argsort(order)
            for batch in sorted({int(place[number]) // size for number in missing}):
                mates = [int(number) for number in order[batch * size : (batch + 1) * size]]
                mates = [number for number in mates if self.rows[number].usable]
                scores = self._start_scores([self.rows[number] for number in mates])
                self._references |= dict(zip(mates, scores, strict=True))
        return {number: self._references[number] for number in chosen}

    def _measured(self, rows: list[TrainRow]) -> dict[str, float]:
        ratios = self._scores_of(rows, self.trainable, self._fixed.base)
        if self.preference.needs_reference:
            if self._held_out_reference is None:
                self._held_out_reference = self._start_scores(rows)
            ratios = ratios - self._held_out_reference
        margin = ratios[:, 0] - ratios[:, 1]
        losses = PAIR_LOSSES[self.preference.loss_type](jnp.asarray(margin), self.preference.pair)
        return {
            "valid_loss": float(jnp.mean(losses)),
            "valid_margin": float(margin.mean()),
            "valid_reward_accuracy": float((margin > 0).mean()),
        }

    def _start_scores(self, rows: list[TrainRow]) -> np.ndarray:
        assert self._start is not None
        if self.settings.lora is None:
            return self._scores_of(rows, self._start, None)
        return self._scores_of(rows, jax.tree.map(jnp.zeros_like, self.trainable), self._base)

    def _scores_of(self, rows: list[TrainRow], trainable: Params, base: Params | None) -> np.ndarray:
        """float32 [rows, 2]: of the preferred answer and of the other."""
        found = np.zeros((len(rows), 2), np.float32)
        for some, packed, slot in self._packed_pairs(rows):
            told = self._row_score(trainable, base, layout_of(packed)).logprob
            logprobs = np.where(packed.weight > 0, np.asarray(told), 0.0)
            score = np.bincount(slot, logprobs, minlength=2 * len(some)).astype(np.float64)
            if self.preference.means:
                score /= np.maximum(np.bincount(slot, packed.weight, minlength=2 * len(some)), 1.0)
            found[some] = score.reshape(-1, 2)
        return found

    def _packed_pairs(self, rows: list[TrainRow]) -> Iterator[tuple[list[int], PackedBatch, np.ndarray]]:
        """Micro-batches of whole pairs: their places in `rows`, layout, and the answer (2·pair + 0 or 1) of each target."""
        for some in _chunks(list(range(len(rows))), [_size(row) for row in rows], self.microbatch_tokens):
            batch, slots = end_to_end([rows[place] for place in some])
            packed = pack(batch, max_row=min(MAX_ROW, self.microbatch_tokens))
            yield some, packed, slots[packed.sample]


def layout_of(packed: PackedBatch) -> Layout:
    arrays: dict[str, Any] = {name: getattr(packed, name) for name in Layout._fields if name != "trained"}
    return Layout(**arrays, trained=packed.weight)  # type: ignore[arg-type]


def _size(row: TrainRow) -> int:
    return sum(len(one.ids) for part in row.parts for one in part)


def _chunks(items: list[int], sizes: list[int], limit: int) -> Iterator[list[int]]:
    """Runs of items whose sizes add up to at most `limit`; an item beyond it stands alone."""
    some: list[int] = []
    held = 0
    for item, size in zip(items, sizes, strict=True):
        if some and held + size > limit:
            yield some
            some, held = [], 0
        some.append(item)
        held += size
    if some:
        yield some
