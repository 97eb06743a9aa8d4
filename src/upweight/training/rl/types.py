"""The typed batches, and the helpers that make their masks."""

from upweight.training.rl.generations import GeneratedBatch, GeneratedSequenceBatch, IterativeGenerationBatch
from upweight.training.rl.masks import canonicalize_response_mask, prepare_autoregressive_token_mask
from upweight.training.rl.preferences import PreferenceBatch
from upweight.training.rl.requests import GenerationRequest, IterativeGenerationRequest, SequenceGenerationRequest
from upweight.training.rl.rollouts import GroupRolloutBatch, SequenceRolloutBatch
from upweight.training.rl.trajectories import TrajectoryBatch

__all__ = [
    "GeneratedBatch",
    "GeneratedSequenceBatch",
    "GenerationRequest",
    "GroupRolloutBatch",
    "IterativeGenerationBatch",
    "IterativeGenerationRequest",
    "PreferenceBatch",
    "SequenceGenerationRequest",
    "SequenceRolloutBatch",
    "TrajectoryBatch",
    "canonicalize_response_mask",
    "prepare_autoregressive_token_mask",
]
