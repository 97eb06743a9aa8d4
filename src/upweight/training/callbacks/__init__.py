"""Callbacks for a training loop of one's own. Checkpoint and tracker libraries are imported when one of them is used."""

from upweight.training.callbacks.base import BaseCallback, CallbackList, TrainerLike, TrainingCallback
from upweight.training.callbacks.checkpoint import CheckpointConfig, ModelCheckpoint, load_model, save_model
from upweight.training.callbacks.early_stopping import EarlyStopping, EarlyStoppingConfig
from upweight.training.callbacks.loggers import (
    JsonlLogger,
    LoggerCallback,
    LoggerCallbackConfig,
    TensorBoardLoggerCallback,
    TensorBoardLoggerConfig,
    WandbLoggerCallback,
    WandbLoggerConfig,
)
from upweight.training.callbacks.profiling import JAXProfiler, MemoryProfileConfig, MemoryProfiler, ProfilingConfig
from upweight.training.callbacks.progress import ProgressBarCallback, ProgressBarConfig

__all__ = [
    "BaseCallback",
    "CallbackList",
    "CheckpointConfig",
    "EarlyStopping",
    "EarlyStoppingConfig",
    "JAXProfiler",
    "JsonlLogger",
    "LoggerCallback",
    "LoggerCallbackConfig",
    "MemoryProfileConfig",
    "MemoryProfiler",
    "ModelCheckpoint",
    "ProfilingConfig",
    "ProgressBarCallback",
    "ProgressBarConfig",
    "TensorBoardLoggerCallback",
    "TensorBoardLoggerConfig",
    "TrainerLike",
    "TrainingCallback",
    "WandbLoggerCallback",
    "WandbLoggerConfig",
    "load_model",
    "save_model",
]
