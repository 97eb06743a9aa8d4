"""Rollouts in the trainer's process: grouped generation on the engine, a reward interface, a buffer of results, and the loop."""

from upweight.online.batches import PreferencePairs, preference_pairs, train_batch
from upweight.online.data import RawRollout, RolloutResult, SamplingTransform
from upweight.online.generator import RolloutGenerator
from upweight.online.load_check import LoadCheck, check_loaded
from upweight.online.rewards import BaseRewardModel
from upweight.online.runner import RolloutRunner
from upweight.online.trainer import OnlineStep, OnlineTrainer
from upweight.online.typed_batches import rollout_batch

__all__ = [
    "BaseRewardModel",
    "LoadCheck",
    "OnlineStep",
    "OnlineTrainer",
    "PreferencePairs",
    "RawRollout",
    "RolloutGenerator",
    "RolloutResult",
    "RolloutRunner",
    "SamplingTransform",
    "check_loaded",
    "preference_pairs",
    "rollout_batch",
    "train_batch",
]
