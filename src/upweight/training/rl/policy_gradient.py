"""What the trainers on rollouts share: which rows and numbers a rollout brings, and the terms of their losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from upweight.errors import BatchError, BatchTypeError
from upweight.ops.masked_stats import masked
from upweight.ops.policy_loss import log_ratio
from upweight.ops.returns import at_last_action
from upweight.training.rl.adapters import SequencePolicyAdapter
from upweight.training.rl.checks import check_any_rows, check_positive
from upweight.training.rl.compiled import Metrics, join
from upweight.training.rl.devices import on_host
from upweight.training.rl.inputs import Inputs, Totals, aggregate, token_mean
from upweight.training.rl.padding import pad_rollout
from upweight.training.rl.rollouts import GroupRolloutBatch, SequenceRolloutBatch, check_whole_groups
from upweight.training.rl.scoring import ActionScores, Places
from upweight.training.rl.trainer import Config, SequenceTrainer, applying


class RolloutTrainer(SequenceTrainer[Config]):
    """A trainer on `SequenceRolloutBatch`, in groups or not."""

    def __init__(
        self,
        model: nnx.Module,
        optimizer: Any,
        config: Config,
        policy_adapter: Any = None,
        others: dict[str, Any] | None = None,
        reference: Any = None,
    ) -> None:
        self.policy_adapter = SequencePolicyAdapter(model) if policy_adapter is None else policy_adapter
        super().__init__(model, optimizer, config, {"policy": self.policy_adapter, **(others or {})}, reference)

    def _passes(
        self, batch: Any, epochs: int, minibatch_size: int | None, seed: int | None, unit: int = 1
    ) -> tuple[jax.Array, Metrics]:
        """Several updates from one batch, cut between each `unit` of rows; mean loss and metrics of the updates."""
        for name, value in (("epochs", epochs), ("minibatch_size", minibatch_size)):
            if value is not None:
                check_positive(name, value)
        batch = self._checked(batch)
        count = rollout_of(batch).batch_size
        size = min(minibatch_size or count, count)
        if size % unit:
            raise BatchError(f"minibatch_size is {size}; it must be a multiple of group_size {unit}")
        (inputs,), extra = self._prepared([batch])
        inputs = self._fixed(inputs)
        mask = on_host(inputs.mask)
        random = None if seed is None else np.random.default_rng(seed)
        found = []
        for _ in range(epochs):
            units = np.arange(count // unit) if random is None else random.permutation(count // unit)
            order = (units[:, None] * unit + np.arange(unit)).reshape(-1)
            parts = [order[i : i + size] for i in range(0, count, size)]
            for part, piece in zip(parts, self._cut(inputs, mask, parts), strict=True):
                totals = Totals.of(mask[part], np)
                if totals.tokens > 0 or not mask.any():
                    found.append(self._updated([piece], totals))
        loss, metrics = join(found)
        share = {name: x if name.endswith("_max") else x / len(found) for name, x in metrics.items()}
        return loss / len(found), self._finished(applying(share, Totals.of(mask, np)) | extra)

    def _fixed(self, inputs: Inputs) -> Inputs:
        """With what several updates are measured against, where `_prepare` leaves it to the update."""
        return inputs

    def _padded(self, batch: Any) -> Any:
        rollout, size = rollout_of(batch), getattr(batch, "group_size", 1)
        shape = self._shapes.fit(rollout.batch_size, rollout.sequences.shape[1], size) if self._may_pad() else None
        if shape is None:
            return batch
        padded = pad_rollout(rollout, *shape)
        return replace(batch, rollout=padded) if isinstance(batch, GroupRolloutBatch) else padded

    def _aggregated(self, x: jax.Array, inputs: Inputs, places: Places, totals: Totals) -> jax.Array:
        length = getattr(self.config, "max_response_length", None)
        name: str = self.config.loss_aggregation  # type: ignore[attr-defined]
        return aggregate(name, x, places, inputs.mask.shape[0], totals, length)

    def _entropy(self, scores: ActionScores, inputs: Inputs, places: Places, totals: Totals) -> jax.Array:
        """0 when it was not computed."""
        if scores.entropy is None:
            return jnp.float32(0.0)
        return self._aggregated(scores.entropy, inputs, places, totals)


def rollout_of(batch: Any) -> SequenceRolloutBatch:
    return batch.rollout if isinstance(batch, GroupRolloutBatch) else batch


def check_rollout(batch: Any, trainer: str) -> None:
    """A rollout, alone or in whole groups, of integer tokens; `BatchTypeError` or `BatchError` otherwise."""
    rollout = rollout_of(batch)
    if not isinstance(rollout, SequenceRolloutBatch):
        raise BatchTypeError(f"{trainer} got a {type(batch).__name__}; it trains on SequenceRolloutBatch")
    if not jnp.issubdtype(rollout.sequences.dtype, jnp.integer):
        raise BatchTypeError(f"sequences has dtype {rollout.sequences.dtype}, trainers need integer token ids")
    if rollout.sequences.shape[1] < 2:
        raise BatchError(f"sequences has shape {tuple(rollout.sequences.shape)}; an action needs a token before it")
    check_any_rows("sequences", rollout.sequences)
    check_again(rollout, rollout.sequence_batch, rollout.sequence_batch.generation)
    if isinstance(batch, GroupRolloutBatch):
        check_whole_groups(batch.batch_size, batch.group_size)


def check_again(*batches: Any) -> None:
    """The checks of construction: transformations replace fields and check nothing. The batches are not touched, since they
    may belong to an outer trace."""
    for batch in batches:
        replace(batch)


def old_log_probs(rollout: SequenceRolloutBatch) -> jax.Array | None:
    """The rollout's own, else those of its generation when they fit the actions."""
    if rollout.old_log_probs is not None:
        return rollout.old_log_probs
    return _fitting(rollout.sequence_batch.old_log_probs, rollout.action_shape)


def reference_log_probs(rollout: SequenceRolloutBatch) -> jax.Array | None:
    """Those of the generation when they fit the actions."""
    return _fitting(rollout.sequence_batch.reference_log_probs, rollout.action_shape)


def token_rewards(rollout: SequenceRolloutBatch, mask: jax.Array) -> jax.Array | None:
    """float32 (B,A): the rewards of tokens, else the one of the sequence at its last active action; None without either."""
    if rollout.token_rewards is not None:
        return masked(rollout.token_rewards.astype(jnp.float32), mask)
    if rollout.sequence_rewards is None:
        return None
    return at_last_action(rollout.sequence_rewards, mask)


def _fitting(x: Any, shape: tuple[int, int]) -> jax.Array | None:
    return x if x is not None and tuple(x.shape) == shape else None


def count_metrics(places: Places, totals: Totals) -> Metrics:
    tokens = jnp.sum((places.trained > 0).astype(jnp.float32))
    return {"num_tokens": tokens, "response_length_mean": tokens / jnp.maximum(totals.sequences, 1.0)}


def ratio_metrics(
    lp: jax.Array,
    old: jax.Array,
    places: Places,
    totals: Totals,
    low: float,
    high: float,
    ratio: jax.Array | None = None,
) -> Metrics:
    """How far the policy is from the one that the ratio is against. `ratio` [N] is the one that is clipped, when it is not the
    token's own."""
    shift = log_ratio(jax.lax.stop_gradient(lp), old, places.trained)
    own = jnp.exp(shift) if ratio is None else jax.lax.stop_gradient(ratio)

    def mean(x: jax.Array) -> jax.Array:
        return token_mean(x, places, totals)

    return {
        "approx_kl": mean(jnp.exp(shift) - 1.0 - shift),
        "clip_fraction_low": mean((own < 1.0 - low).astype(jnp.float32)),
        "clip_fraction_high": mean((own > 1.0 + high).astype(jnp.float32)),
        "ratio_mean": mean(own),
        "ratio_max": jnp.max(masked(own, places.trained)),
    }
