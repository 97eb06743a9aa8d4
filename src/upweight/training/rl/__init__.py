"""Reinforcement learning on typed batches: batches, configs, trainers, adapters, back ends, rewards, functions."""

from upweight.training.rl.adapters import SequencePolicyAdapter, SequenceValueHeadAdapter
from upweight.training.rl.backends import (
    LocalSequenceGenerationBackend,
    LocalSequenceRolloutBackend,
    with_advantages,
)
from upweight.training.rl.configs import DPOConfig, GRPOConfig, PPOConfig, REINFORCEConfig, SFTConfig
from upweight.training.rl.devices import Placement
from upweight.training.rl.dpo import DPOTrainer
from upweight.training.rl.functions import (
    compute_clipped_surrogate_loss,
    compute_discounted_returns,
    compute_gae_advantages,
    compute_kl_divergence,
    compute_masked_clipped_surrogate_loss,
    compute_masked_kl_divergence,
    compute_masked_policy_entropy,
    compute_policy_entropy,
    masked_mean,
    masked_normalize,
    normalize_advantages,
)
from upweight.training.rl.grpo import GRPOTrainer
from upweight.training.rl.ppo import PPOTrainer
from upweight.training.rl.protocols import (
    IterativeGenerationBackend,
    IterativePolicyAdapter,
    LogProbScorer,
    PolicyAdapter,
    RewardModel,
    SequenceGeneratingModule,
    SequenceGenerationBackend,
    SequenceRolloutBackend,
    SequenceRolloutPolicyAdapter,
    SequenceRolloutValueAdapter,
    ValueAdapter,
)
from upweight.training.rl.reinforce import REINFORCETrainer
from upweight.training.rl.rewards import (
    ClippedReward,
    CompositeReward,
    ConstantReward,
    RewardFunction,
    ScaledReward,
    ThresholdReward,
    as_reward_model,
)
from upweight.training.rl.saving import load_state, newest_state, prune_states, save_state
from upweight.training.rl.sft import SFTTrainer
from upweight.training.rl.types import (
    GeneratedBatch,
    GeneratedSequenceBatch,
    GenerationRequest,
    GroupRolloutBatch,
    IterativeGenerationBatch,
    IterativeGenerationRequest,
    PreferenceBatch,
    SequenceGenerationRequest,
    SequenceRolloutBatch,
    TrajectoryBatch,
)
from upweight.training.rl.update import clipped_update

__all__ = [
    "ClippedReward",
    "CompositeReward",
    "ConstantReward",
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "GeneratedBatch",
    "GeneratedSequenceBatch",
    "GenerationRequest",
    "GroupRolloutBatch",
    "IterativeGenerationBackend",
    "IterativeGenerationBatch",
    "IterativeGenerationRequest",
    "IterativePolicyAdapter",
    "LocalSequenceGenerationBackend",
    "LocalSequenceRolloutBackend",
    "LogProbScorer",
    "PPOConfig",
    "PPOTrainer",
    "Placement",
    "PolicyAdapter",
    "PreferenceBatch",
    "REINFORCEConfig",
    "REINFORCETrainer",
    "RewardFunction",
    "RewardModel",
    "SFTConfig",
    "SFTTrainer",
    "ScaledReward",
    "SequenceGeneratingModule",
    "SequenceGenerationBackend",
    "SequenceGenerationRequest",
    "SequencePolicyAdapter",
    "SequenceRolloutBackend",
    "SequenceRolloutBatch",
    "SequenceRolloutPolicyAdapter",
    "SequenceRolloutValueAdapter",
    "SequenceValueHeadAdapter",
    "ThresholdReward",
    "TrajectoryBatch",
    "ValueAdapter",
    "as_reward_model",
    "clipped_update",
    "compute_clipped_surrogate_loss",
    "compute_discounted_returns",
    "compute_gae_advantages",
    "compute_kl_divergence",
    "compute_masked_clipped_surrogate_loss",
    "compute_masked_kl_divergence",
    "compute_masked_policy_entropy",
    "compute_policy_entropy",
    "load_state",
    "masked_mean",
    "masked_normalize",
    "newest_state",
    "normalize_advantages",
    "prune_states",
    "save_state",
    "with_advantages",
]
