"""DPO and its family: a loss of the margin [s_π(w) − s_ref(w)] − [s_π(l) − s_ref(l)] (Rafailov et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from upweight.errors import BatchError, ConfigError
from upweight.ops.preference_loss import MEAN_SCORES, PAIR_LOSSES, PairSettings
from upweight.training.rl.adapters import SequencePolicyAdapter, mask_of
from upweight.training.rl.checks import Array, as_array
from upweight.training.rl.compiled import Metrics
from upweight.training.rl.configs import DPOConfig
from upweight.training.rl.inputs import Inputs, Totals
from upweight.training.rl.pairs import check_pairs, from_mapping, pad_pair, reference_scores, side_by_side
from upweight.training.rl.scoring import Places, score_actions
from upweight.training.rl.trainer import SequenceTrainer, config_of
from upweight.training.rl.types import GeneratedSequenceBatch, canonicalize_response_mask


class DPOTrainer(SequenceTrainer[DPOConfig]):
    """Trains on `PreferenceBatch` of `GeneratedSequenceBatch`, or a mapping of token arrays.

    The score of an answer is the sum of the log-probs of its scored tokens; their mean with `length_normalized`, `ipo` and
    `simpo`. Reference scores are those that both halves bring, else of the reference adapter or model.
    """

    def __init__(
        self,
        model: nnx.Module,
        reference_model: Any,
        optimizer: Any,
        config: DPOConfig | None = None,
        *,
        policy_adapter: Any = None,
        reference_adapter: Any = None,
    ) -> None:
        config = config_of(DPOConfig, config, self)
        self.policy_adapter = SequencePolicyAdapter(model) if policy_adapter is None else policy_adapter
        if reference_adapter is None and reference_model is not None:
            reference_adapter = SequencePolicyAdapter(reference_model)
        self.reference_model = reference_model
        self.reference_adapter = reference_adapter
        self._is_free = config.reference_free or config.loss_type == "simpo"
        if reference_adapter is None and not self._is_free and not config.precomputed_reference:
            raise ConfigError(
                "reference_model is None and there is no reference_adapter; give one, or set reference_free, "
                "loss_type 'simpo' or precomputed_reference in the config"
            )
        used = None if self._is_free else reference_adapter
        super().__init__(model, optimizer, config, {"policy": self.policy_adapter}, used)
        self._is_mean = config.length_normalized or config.loss_type in MEAN_SCORES

    def compute_log_probs(self, model_or_scorer: Any, sequences: Array, loss_mask: Array | None = None) -> jax.Array:
        """Scores (B,) of token sequences (B,S); the mask is (B,S) or (B,S−1), None = every token after the first."""
        tokens = as_array("sequences", sequences)
        batch = GeneratedSequenceBatch.from_sequences(
            tokens, response_mask=canonicalize_response_mask(tokens, as_array("loss_mask", loss_mask))
        )
        return self._sequence_scores(model_or_scorer, batch)

    def compute_log_ratios(self, sequences: Array, loss_mask: Array | None = None) -> jax.Array:
        """Score of the policy less that of the reference, (B,); of the policy alone without a reference."""
        own = self.compute_log_probs(self.policy_adapter, sequences, loss_mask)
        return own if self._reference is None else own - self.compute_log_probs(self._reference, sequences, loss_mask)

    def compute_sequence_log_ratios(self, batch: GeneratedSequenceBatch) -> jax.Array:
        """The same of a typed batch."""
        own = self._sequence_scores(self.policy_adapter, batch)
        return own if self._reference is None else own - self._sequence_scores(self._reference, batch)

    def _sequence_scores(self, model_or_scorer: Any, batch: GeneratedSequenceBatch) -> jax.Array:
        has_method = callable(getattr(model_or_scorer, "sequence_log_probs", None))
        scorer = model_or_scorer if has_method else SequencePolicyAdapter(model_or_scorer)
        total = jnp.asarray(scorer.sequence_log_probs(batch), jnp.float32)
        return total / jnp.maximum(jnp.sum(mask_of(batch), axis=1), 1.0) if self._is_mean else total

    def _checked(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            batch, fallbacks = from_mapping(batch)
            if fallbacks:
                self._warn_once(
                    "attention_mask",
                    f"{' and '.join(fallbacks)} used as loss masks: prompts are scored too; give …_loss_mask for answers only",
                )
        check_pairs(batch)
        if self._reference is None and not self._is_free:
            for name in ("chosen", "rejected"):
                if getattr(batch, name).reference_log_probs is None:
                    raise BatchError(
                        f"{name} has no reference_log_probs, and with precomputed_reference there is no model for them"
                    )
        return batch

    def _padded(self, batch: Any) -> Any:
        return pad_pair(batch, self._shapes) if self._may_pad() else batch

    def _prepare(self, model: Any, reference: Any, batch: Any) -> tuple[Inputs, Metrics]:
        both, mask = side_by_side(batch)
        scores = None if self._is_free else reference_scores(batch, mean=self._is_mean)
        paired = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), both)
        arrays = {} if scores is None else {"reference": scores}
        return Inputs(paired, mask.reshape(-1, 2, mask.shape[-1]), arrays), {}

    def _loss(
        self, model: Any, reference: Any, inputs: Inputs, places: Places, totals: Totals
    ) -> tuple[jax.Array, Metrics]:
        config = self.config
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), inputs.batch)
        live = (jnp.max(inputs.mask, axis=(1, 2)) > 0).astype(jnp.float32)
        own = self._scores(self._bound("policy", model), batch, places)
        if "reference" in inputs.arrays:
            ref = inputs.arrays["reference"]
        elif self._reference is not None:
            ref = jax.lax.stop_gradient(self._scores(self._bound_reference(reference), batch, places))
        else:
            ref = jnp.zeros_like(own)
        ratios = jnp.where(live[:, None] > 0, own - ref, 0.0)
        margin = ratios[:, 0] - ratios[:, 1]
        settings = PairSettings(beta=config.beta, smoothing=config.label_smoothing, gamma=config.simpo_gamma)
        pairs = jnp.maximum(totals.sequences, 1.0)

        def mean(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(live > 0, x, 0.0)) / pairs

        loss = mean(PAIR_LOSSES[config.loss_type](margin, settings))
        tokens = jnp.sum((places.trained > 0).astype(jnp.float32))
        metrics = {
            "dpo_loss": loss,
            "total_loss": loss,
            "reward_accuracy": mean((margin > 0).astype(jnp.float32)),
            "chosen_log_ratios": mean(ratios[:, 0]),
            "rejected_log_ratios": mean(ratios[:, 1]),
            "margin": mean(margin),
            "rewards_chosen": config.beta * mean(ratios[:, 0]),
            "rewards_rejected": config.beta * mean(ratios[:, 1]),
            "num_tokens": tokens,
            "response_length_mean": tokens / (2.0 * pairs),
        }
        return loss, jax.lax.stop_gradient(metrics)

    def _scores(self, adapter: Any, batch: GeneratedSequenceBatch, places: Places) -> jax.Array:
        """(pairs, 2) from one forward pass over both halves."""
        rows = batch.batch_size
        count = jax.ops.segment_sum((places.trained > 0).astype(jnp.float32), places.row, rows)
        if callable(getattr(adapter, "action_log_probs", None)):
            scores = score_actions(adapter, batch, places)
            total = jax.ops.segment_sum(scores.log_probs, places.row, rows)
        else:
            total = jnp.asarray(adapter.sequence_log_probs(batch), jnp.float32)
        return (total / jnp.maximum(count, 1.0) if self._is_mean else total).reshape(-1, 2)
