"""Supervised fine-tuning: L = −Σ m·lp / Σ m, the mean cross-entropy of the tokens of answers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from upweight.errors import BatchError, BatchTypeError
from upweight.training.rl.adapters import SequencePolicyAdapter, mask_of
from upweight.training.rl.checks import check_any_rows
from upweight.training.rl.compiled import Metrics
from upweight.training.rl.configs import SFTConfig
from upweight.training.rl.inputs import Inputs, Totals, token_mean
from upweight.training.rl.padding import pad_sequences
from upweight.training.rl.pairs import host_mask
from upweight.training.rl.policy_gradient import check_again
from upweight.training.rl.scoring import Places, score_actions
from upweight.training.rl.trainer import SequenceTrainer, config_of
from upweight.training.rl.types import GeneratedSequenceBatch


class SFTTrainer(SequenceTrainer[SFTConfig]):
    """Trains on `GeneratedSequenceBatch`: on the tokens of `response_mask`, each weighing the same."""

    def __init__(
        self, model: nnx.Module, optimizer: Any, config: SFTConfig | None = None, *, policy_adapter: Any = None
    ) -> None:
        self.policy_adapter = SequencePolicyAdapter(model) if policy_adapter is None else policy_adapter
        config = config_of(SFTConfig, config, self)
        super().__init__(model, optimizer, config, {"policy": self.policy_adapter}, None)

    def _checked(self, batch: Any) -> Any:
        if not isinstance(batch, GeneratedSequenceBatch):
            raise BatchTypeError(f"SFTTrainer got a {type(batch).__name__}; it trains on GeneratedSequenceBatch")
        tokens = batch.sequences
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise BatchError(f"sequences has shape {tuple(tokens.shape)}, it must be (B, S) with S ≥ 2")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise BatchTypeError(f"sequences has dtype {tokens.dtype}, trainers need integer token ids")
        check_any_rows("sequences", tokens)
        check_again(batch, batch.generation)
        if not _has_tracers(batch) and not host_mask(batch).any():
            raise BatchError("response_mask has 0 trainable tokens: it is 0 on every token after the first of each row")
        return batch

    def _padded(self, batch: Any) -> Any:
        shape = self._shapes.fit(*batch.sequences.shape) if self._may_pad() else None
        return batch if shape is None else pad_sequences(batch, *shape)

    def _prepare(self, model: Any, reference: Any, batch: Any) -> tuple[Inputs, Metrics]:
        return Inputs(batch, mask_of(batch), {}), {}

    def _loss(
        self, model: Any, reference: Any, inputs: Inputs, places: Places, totals: Totals
    ) -> tuple[jax.Array, Metrics]:
        scores = score_actions(self._bound("policy", model), inputs.batch, places, hits=True)
        loss = -token_mean(scores.log_probs, places, totals)
        metrics = {"loss": loss, "num_tokens": jnp.sum((places.trained > 0).astype(jnp.float32))}
        if scores.hits is not None:
            metrics["token_accuracy"] = token_mean(scores.hits, places, totals)
        return loss, jax.lax.stop_gradient(metrics)


def _has_tracers(batch: GeneratedSequenceBatch) -> bool:
    masks = (batch.response_mask, batch.prompt_mask, batch.generation.output_mask)
    return any(
        isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable) for x in masks
    )
