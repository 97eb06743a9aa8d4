"""What trainers and back ends ask of the parts that others write. Structural: any object with the methods will do."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax

from upweight.training.rl.checks import Array
from upweight.training.rl.types import (
    GeneratedBatch,
    GeneratedSequenceBatch,
    GroupRolloutBatch,
    IterativeGenerationBatch,
    IterativeGenerationRequest,
    SequenceGenerationRequest,
    SequenceRolloutBatch,
)


@runtime_checkable
class PolicyAdapter(Protocol):
    def action_log_probs(self, batch: Any) -> jax.Array:
        """Log-probs of the actions taken."""
        ...


@runtime_checkable
class LogProbScorer(Protocol):
    def sequence_log_probs(self, batch: GeneratedSequenceBatch) -> jax.Array:
        """One score a sequence, (B,)."""
        ...


@runtime_checkable
class SequenceGenerationBackend(Protocol):
    def generate_sequences(self, request: SequenceGenerationRequest) -> GeneratedSequenceBatch: ...


@runtime_checkable
class SequenceGeneratingModule(Protocol):
    def generate(self, total_samples: int, **kwargs: Any) -> Array:
        """Sequences (total_samples, S), each beginning with its prompt."""
        ...


@runtime_checkable
class IterativeGenerationBackend(Protocol):
    def generate_iterations(self, request: IterativeGenerationRequest) -> IterativeGenerationBatch: ...


@runtime_checkable
class IterativePolicyAdapter(Protocol):
    def transition_log_probs(self, batch: IterativeGenerationBatch) -> jax.Array:
        """Log-probs of the transitions, (B,T)."""
        ...


@runtime_checkable
class SequenceRolloutPolicyAdapter(Protocol):
    def action_log_probs(self, batch: SequenceRolloutBatch) -> jax.Array:
        """(B,S−1)"""
        ...

    def log_prob_distributions(self, batch: SequenceRolloutBatch) -> jax.Array:
        """(B,S−1,V)"""
        ...


@runtime_checkable
class SequenceRolloutBackend(Protocol):
    def generate_rollout(self, request: SequenceGenerationRequest) -> SequenceRolloutBatch: ...

    def generate_grouped_rollout(
        self, request: SequenceGenerationRequest
    ) -> GroupRolloutBatch[SequenceRolloutBatch]: ...


@runtime_checkable
class ValueAdapter(Protocol):
    def state_values(self, batch: Any) -> jax.Array: ...


@runtime_checkable
class SequenceRolloutValueAdapter(Protocol):
    def action_values(self, batch: SequenceRolloutBatch) -> jax.Array:
        """Value of the state in which each action is taken, (B,S−1)."""
        ...


@runtime_checkable
class RewardModel(Protocol):
    def score_generations(self, batch: GeneratedBatch) -> Array:
        """One reward an output, (B,)."""
        ...
