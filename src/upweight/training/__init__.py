"""Batches → parameters.

The public names of `upweight.training.rl` and of `gradients` are importable from here; they are loaded on use, so that a job's
worker, which needs neither, does not pay for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upweight.training.gradients import (  # noqa: F401
        DynamicLossScaler,
        DynamicLossScalerConfig,
        GradientAccumulator,
        GradientAccumulatorConfig,
    )
    from upweight.training.rl import *  # noqa: F403

GRADIENTS = ("DynamicLossScaler", "DynamicLossScalerConfig", "GradientAccumulator", "GradientAccumulatorConfig")


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    source = import_module("upweight.training.gradients" if name in GRADIENTS else "upweight.training.rl")
    if name not in GRADIENTS and name not in source.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(source, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *GRADIENTS, *import_module("upweight.training.rl").__all__})
