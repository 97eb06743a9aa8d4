"""Adapters on the model at hand: a step is traced with a copy of the model, so adapters are bound anew to what they are given."""

from __future__ import annotations

import copy
from typing import Any

from flax import nnx

from upweight.errors import BatchTypeError


def rebind(adapter: Any, own: Any, model: Any) -> Any:
    """The adapter on `model`; `own` is the model that the adapter's trainer was built with.

    An adapter with `bind` is asked; one without gets the model in a copy of itself when it holds the trainer's own;
    one that holds no model stays as it is. `BatchTypeError` (a TypeError) for one that holds another and has no `bind`.
    """
    held = getattr(adapter, "model", None)
    if held is None or held is model:
        return adapter
    if callable(getattr(adapter, "bind", None)):
        return adapter.bind(model)
    if held is not own:
        raise BatchTypeError(
            f"{type(adapter).__name__} holds another model than the one to be trained and has no bind(model); "
            "build it with the trainer's model or give it a bind method"
        )
    twin = copy.copy(adapter)
    twin.model = model
    return twin


def module_of(adapter: Any) -> nnx.Module | None:
    """The module of a reference adapter whose arrays can be handed to a compiled step."""
    held = getattr(adapter, "model", None)
    return held if isinstance(held, nnx.Module) and callable(getattr(adapter, "bind", None)) else None
