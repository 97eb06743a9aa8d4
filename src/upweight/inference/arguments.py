"""Sampling arguments of the library calls → one `SamplingParams` a prompt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from upweight.inference.types import SamplingParams

# What a call means by None; `max_tokens` and `seed` have a meaning of their own for it.
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "frequency_penalty": 0.0,
    "rep_window": 64,
    "min_tokens": 0,
    "ignore_eos": False,
}
_WHOLE = ("max_tokens", "top_k", "rep_window", "min_tokens", "seed")


def sampling_params(
    count: int, *, stop_ids: Any = None, stop: str | Sequence[str] | None = None, **columns: Any
) -> list[SamplingParams]:
    """Each keyword is one value or a sequence or array of `count`; `stop_ids` and `stop` hold for all.

    `ValueError` naming the keyword for another number of values, or for a value that is no number.
    """
    shared: dict[str, Any] = {
        "stop_ids": frozenset(() if stop_ids is None else token_ids(stop_ids, "stop_ids")),
        "stop": stop_strings(stop),
    }
    values = {name: _per_prompt(name, value, count) for name, value in columns.items()}
    return [SamplingParams(**{name: column[i] for name, column in values.items()}, **shared) for i in range(count)]


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """One string is one stop string, not its characters. `ValueError` for an empty one and for what is no text."""
    given = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise ValueError(f"stop is {stop!r}; it must be a text or a list of texts")
    texts = tuple(given)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop is {stop!r}; each stop string must be a text that is not empty")
    return texts


def token_ids(prompt: Any, name: str = "prompt") -> tuple[int, ...]:
    """A prompt's ids, whatever holds them; whole floats will do. `ValueError` names the place of what is none."""
    values = plain(prompt)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {values!r}; it must be a list of token ids")
    return tuple(i if type(i) is int else _token_id(f"{name}[{at}]", plain(i)) for at, i in enumerate(values))


def _token_id(name: str, value: Any) -> int:
    if not isinstance(value, int | float) or not math.isfinite(value) or value != int(value):
        raise ValueError(f"{name} is {value!r}; a token id is a whole number")
    return int(value)


def plain(value: Any) -> Any:
    """Lists and numbers in place of arrays."""
    return value.tolist() if hasattr(value, "tolist") else value


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    value = plain(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} values for {count} prompts")
        return [_number(name, plain(one)) for one in value]
    return [_number(name, value)] * count


def _number(name: str, value: Any) -> Any:
    if value is None:
        return DEFAULTS.get(name)
    if isinstance(value, str) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    if name in _WHOLE:
        if not math.isfinite(value) or value != int(value):
            raise ValueError(f"{name} is {value!r}; it must be a whole number")
        return int(value)
    return bool(value) if name == "ignore_eos" else float(value)
