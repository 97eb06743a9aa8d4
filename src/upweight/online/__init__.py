"""Rollouts in the trainer's process: grouped generation on the engine, a reward interface, and a buffer of results."""

from upweight.online.data import RawRollout, RolloutResult
from upweight.online.generator import RolloutGenerator
from upweight.online.load_check import LoadCheck, check_loaded
from upweight.online.rewards import BaseRewardModel
from upweight.online.runner import RolloutRunner

__all__ = [
    "BaseRewardModel",
    "LoadCheck",
    "RawRollout",
    "RolloutGenerator",
    "RolloutResult",
    "RolloutRunner",
    "check_loaded",
]
