"""A Flax NNX module in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flax import nnx

_FLAGS = ("deterministic", "use_running_average")


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """`model.eval()` inside; afterwards, also after an exception, each part has the mode it had. Other objects are left alone."""
    if not isinstance(model, nnx.Module):
        yield
        return
    before = [
        (module, flag, getattr(module, flag))
        for _, module in nnx.iter_modules(model)
        for flag in _FLAGS
        if hasattr(module, flag)
    ]
    model.eval()
    try:
        yield
    finally:
        for module, flag, value in before:
            setattr(module, flag, value)
