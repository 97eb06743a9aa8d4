"""From a model called as `model(tokens)` to the log-probs and values of actions.

Position a of the logits predicts token a + 1. Log-probs are `log_softmax(logits / temperature)` in float32, with the temperature
of each row (1 unless the batch says otherwise).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from upweight.errors import BatchError, BatchTypeError
from upweight.ops.masked_stats import masked
from upweight.training.rl.extraction import align_values, extract_logits_from_output, extract_values_from_output
from upweight.training.rl.forward import Vocabulary, forward
from upweight.training.rl.rollouts import SequenceRolloutBatch, action_mask
from upweight.training.rl.sharing import Layout
from upweight.training.rl.types import GeneratedSequenceBatch

__all__ = [
    "SequencePolicyAdapter",
    "SequenceValueHeadAdapter",
    "extract_logits_from_output",
    "extract_values_from_output",
]

UNKNOWN = 2**31 - 1  # a critic that shows no logits shows no vocabulary either: its ids are taken as they are
Batch = SequenceRolloutBatch | GeneratedSequenceBatch
KwargsFactory = Callable[[Any], Mapping[str, Any]]


def mask_of(batch: Batch) -> jax.Array:
    """float32 (B,S−1), the actions that count."""
    return batch.action_mask if isinstance(batch, SequenceRolloutBatch) else action_mask(batch)


def temperature_of(batch: Batch) -> jax.Array:
    """float32 (B,); 0 (greedy) is scored as 1."""
    given = getattr(batch, "temperature", None)
    if given is None:
        return jnp.ones(batch.batch_size, jnp.float32)
    return jnp.where(given > 0, given, 1.0).astype(jnp.float32)


def integral_tokens(batch: Batch) -> jax.Array:
    tokens = batch.sequences
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise BatchTypeError(f"sequences has dtype {tokens.dtype}, trainers need integer token ids")
    return tokens


class _Adapter:
    def __init__(self, model: Any, model_kwargs_factory: KwargsFactory | None) -> None:
        self.model = model
        self.model_kwargs_factory = model_kwargs_factory
        self._vocabulary = Vocabulary()

    def bind(self, model: Any) -> Any:
        """The same adapter on another model of the same form."""
        twin = copy.copy(self)
        twin.model = model
        return twin

    def kwargs(self, batch: Batch) -> dict[str, Any]:
        return dict(self.model_kwargs_factory(batch)) if self.model_kwargs_factory else {}

    def read(self, batch: Batch, read: Callable[[Any, Any], Any], size_of: Callable[[Any], int]) -> Any:
        """`read(model, output of the one forward pass)`."""
        tokens = integral_tokens(batch)
        trained = jnp.pad(mask_of(batch), ((0, 0), (1, 0)))
        kwargs = self.kwargs(batch)

        def function(model: Any, tokens: jax.Array) -> Any:
            return read(model, model(tokens, **kwargs))

        return forward(self.model, function, tokens, trained, self._vocabulary, size_of)

    def hidden(self, batch: Batch, layout: Layout | None = None) -> jax.Array:
        """(B,S,H) of a model that offers `hidden_states`; (P,T,H) of the batch's tokens in a layout."""

        def size_of(hidden: Any) -> int:
            return jax.eval_shape(self.model.head, hidden).shape[-1] if hasattr(self.model, "head") else UNKNOWN

        def function(model: Any, tokens: jax.Array) -> jax.Array:
            if layout is None:
                return model.hidden_states(tokens)
            return model.hidden_states(tokens, positions=layout.positions, allowed=layout.allowed())

        if layout is not None:
            # A trained id out of range still makes its own log-prob NaN, as a target.
            nowhere = jnp.zeros(layout.tokens.shape)
            return forward(self.model, function, jnp.asarray(layout.tokens), nowhere, self._vocabulary, size_of)
        trained = jnp.pad(mask_of(batch), ((0, 0), (1, 0)))
        return forward(self.model, function, integral_tokens(batch), trained, self._vocabulary, size_of)


def has_halves(model: Any, *heads: str) -> bool:
    """Whether the model offers `hidden_states` and the named heads on it."""
    return all(callable(getattr(model, name, None)) for name in ("hidden_states", *heads))


class SequencePolicyAdapter(_Adapter):
    """Log-probs of a batch's tokens under `model(sequences, **model_kwargs_factory(batch))`.

    `logits_extractor` finds the logits in the model's output when `extract_logits_from_output` does not.
    """

    def __init__(
        self,
        model: Any,
        *,
        model_kwargs_factory: KwargsFactory | None = None,
        logits_extractor: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(model, model_kwargs_factory)
        self.logits_extractor = logits_extractor

    def extract(self, output: Any, shape: tuple[int, ...]) -> jax.Array:
        """Logits (B,S,V) of an output; `BatchError` (a ValueError) when they do not fit the tokens' shape (B,S)."""
        found = self.logits_extractor(output) if self.logits_extractor else extract_logits_from_output(output)
        logits = jnp.asarray(found)
        if logits.ndim != 3 or logits.shape[:2] != shape:
            raise BatchError(
                f"logits has shape {tuple(logits.shape)}, for tokens {tuple(shape)} it must be (B, S, vocabulary)"
            )
        return logits

    def logits(self, batch: Batch) -> jax.Array:
        """(B,S,V) of one forward pass."""
        if self.logits_extractor is None and self.model_kwargs_factory is None and has_halves(self.model, "head"):
            return self.extract(self.model.head(self.hidden(batch)), tuple(batch.sequences.shape))
        shape = tuple(batch.sequences.shape)
        return self.read(batch, lambda _, output: self.extract(output, shape), lambda logits: logits.shape[-1])

    def log_prob_distributions(self, batch: Batch) -> jax.Array:
        """float32 (B,S−1,V)."""
        logits = self.logits(batch)[:, :-1].astype(jnp.float32)
        return jax.nn.log_softmax(logits / temperature_of(batch)[:, None, None], axis=-1)

    def action_log_probs(self, batch: Batch) -> jax.Array:
        """float32 (B,S−1); 0 where the batch masks the action."""
        mask = mask_of(batch)
        logp = jnp.where(mask[..., None] > 0, self.log_prob_distributions(batch), 0.0)
        target = valid_targets(batch.sequences[:, 1:], mask, logp.shape[-1])
        return masked(jnp.take_along_axis(logp, target[..., None], axis=-1)[..., 0], mask)

    def sequence_log_probs(self, batch: Batch) -> jax.Array:
        """float32 (B,): the sum of the log-probs of the actions that count."""
        return jnp.sum(self.action_log_probs(batch), axis=1)


def valid_targets(tokens: jax.Array, trained: jax.Array, size: int) -> jax.Array:
    """Token ids for a gather: 0 where not trained; a negative trained id is put out of range, where a gather gives NaN."""
    return jnp.where(trained > 0, jnp.where(tokens < 0, size, tokens), 0)


class SequenceValueHeadAdapter(_Adapter):
    """Values of the states in which a batch's actions are taken, from the output of the same kind of call."""

    def __init__(
        self,
        model: Any,
        *,
        model_kwargs_factory: KwargsFactory | None = None,
        value_extractor: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(model, model_kwargs_factory)
        self.value_extractor = value_extractor

    def extract(self, output: Any, shape: tuple[int, int]) -> jax.Array:
        """float32 (B,S−1) of an output."""
        found = (
            self.value_extractor(output) if self.value_extractor else extract_values_from_output(output, shape=shape)
        )
        return align_values(jnp.asarray(found), shape)

    def action_values(self, batch: Batch) -> jax.Array:
        """float32 (B,S−1)."""
        rows, length = batch.sequences.shape
        if self.model_kwargs_factory is None and self.value_extractor is None and has_halves(self.model, "value_head"):
            return align_values(jnp.asarray(self.model.value_head(self.hidden(batch))), (rows, length))

        def read(_: Any, output: Any) -> tuple[jax.Array, jax.Array | None]:
            return self.extract(output, (rows, length)), logits_beside(output)

        return self.read(batch, read, lambda both: UNKNOWN if both[1] is None else both[1].shape[-1])[0]


def logits_beside(output: Any) -> jax.Array | None:
    """The logits of an output that is asked for its values; None without any."""
    try:
        logits = extract_logits_from_output(output)
    except BatchTypeError:
        return None
    return logits if logits.ndim == 3 and logits.shape[-1] > 1 else None
