"""Readers of single request fields. Null counts as left out; what is wrong is refused naming field, value and limit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from upweight.errors import RequestError

Body = Mapping[str, Any]


def refuse(field: str, value: Any, must: str) -> RequestError:
    return RequestError(f"{field} is {short(value)}; it must be {must}", field=field)


def only(body: Body, known: Collection[str], inert: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses what is not known. `inert` fields change no answer; `neutral` ones are accepted with these values only."""
    for field, value in body.items():
        if value is None or field in known or field in inert:
            continue
        if field not in neutral:
            raise RequestError(f"unknown field {field!r}", field=field)
        if not any(value == harmless and type(value) is type(harmless) for harmless in neutral[field]):
            allowed = " or ".join(repr(harmless) for harmless in neutral[field])
            raise RequestError(f"{field} is {short(value)}; only {allowed} is offered, or leave it out", field=field)


def flag(body: Body, field: str, default: bool = False) -> bool:
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(field, value, "true or false")
    return value


def whole(body: Body, field: str, default: Any, low: int, high: int) -> Any:
    """A whole number from `low` to `high`, or `default`."""
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refuse(field, value, f"a whole number from {low} to {high}")
    return value


def number(body: Body, field: str, default: Any, low: float, high: float) -> Any:
    """A finite number from `low` to `high`, or `default`."""
    value = body.get(field)
    if value is None:
        return default
    if not is_number(value) or not low <= value <= high:
        raise refuse(field, value, f"a number from {low:g} to {high:g}")
    return float(value)


def object_of(body: Body, field: str) -> dict[str, Any]:
    value = body.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse(field, value, "an object")
    return value


def texts(body: Body, field: str, most: int) -> tuple[str, ...]:
    """A text or a list of texts, none empty."""
    value = body.get(field)
    several = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(several, list) or not all(isinstance(s, str) and s for s in several) or len(several) > most:
        raise refuse(field, value, f"text or a list of up to {most} texts, none empty")
    return tuple(several)


def is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def are_ids(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in values)


def short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of more digits than Python writes out, for instance
        return "beyond any limit"
    return text if len(text) <= 80 else text[:77] + "…"


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than `levels`."""
    level: list[Any] = [value]
    for _ in range(levels):
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for several in inner for x in several if isinstance(x, dict | list)]
        if not level:
            return False
    return True
