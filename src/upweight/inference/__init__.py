"""Prompts → tokens: scheduler (plain Python), runner (device), engine (loop).

Names are imported on use, so that the plain parts (`scheduler`, `pages`, `types`) load without JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upweight.inference.engine import Engine, EngineBusy
    from upweight.inference.library import InferenceEngine
    from upweight.inference.run_batch import InferenceScheduler
    from upweight.inference.sampling import sample
    from upweight.inference.types import FinishReason, GenerationOutput, SamplingParams

__all__ = [
    "Engine",
    "EngineBusy",
    "FinishReason",
    "GenerationOutput",
    "InferenceEngine",
    "InferenceScheduler",
    "SamplingParams",
    "sample",
]

_WHERE = {
    "Engine": "engine",
    "EngineBusy": "engine",
    "InferenceEngine": "library",
    "InferenceScheduler": "run_batch",
    "FinishReason": "types",
    "GenerationOutput": "types",
    "SamplingParams": "types",
    "sample": "sampling",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
