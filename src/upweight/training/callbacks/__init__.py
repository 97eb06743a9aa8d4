"""Callbacks for a training loop of one's own. Checkpoint and tracker libraries are imported when one of them is used."""

from upweight.training.callbacks.base import BaseCallback, CallbackList, TrainerLike, TrainingCallback
from upweight.training.callbacks.checkpoint import CheckpointConfig, ModelCheckpoint, load_model, save_model
from upweight.training.callbacks.early_stopping import EarlyStopping, EarlyStoppingConfig
from upweight.training.callbacks.loggers import JsonlLogger, LoggerCallback, LoggerCallbackConfig
from upweight.training.callbacks.profiling import JAXProfiler, MemoryProfileConfig, MemoryProfiler, ProfilingConfig
from upweight.training.callbacks.progress import ProgressBarCallback, ProgressBarConfig
from upweight.training.callbacks.trackers import (
    MlflowLoggerCallback,
    MlflowLoggerConfig,
    TensorBoardLoggerCallback,
    TensorBoardLoggerConfig,
    TrackioLoggerCallback,
    TrackioLoggerConfig,
    WandbLoggerCallback,
    WandbLoggerConfig,
    tracked,
)

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
    "MlflowLoggerCallback",
    "MlflowLoggerConfig",
    "ModelCheckpoint",
    "ProfilingConfig",
    "ProgressBarCallback",
    "ProgressBarConfig",
    "TensorBoardLoggerCallback",
    "TensorBoardLoggerConfig",
    "TrackioLoggerCallback",
    "TrackioLoggerConfig",
    "TrainerLike",
    "TrainingCallback",
    "WandbLoggerCallback",
    "WandbLoggerConfig",
    "load_model",
    "save_model",
    "tracked",
]
