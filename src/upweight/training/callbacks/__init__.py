"""Callbacks for a training loop of one's own. Trackers are imported when one of them is used."""

from upweight.training.callbacks.base import BaseCallback, CallbackList, TrainerLike, TrainingCallback
from upweight.training.callbacks.early_stopping import EarlyStopping, EarlyStoppingConfig

__all__ = [
    "BaseCallback",
    "CallbackList",
    "EarlyStopping",
    "EarlyStoppingConfig",
    "TrainerLike",
    "TrainingCallback",
]
