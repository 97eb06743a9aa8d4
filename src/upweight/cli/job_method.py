"""The method object of a new job, from `--method` and single options. Defaults, names and ranges are the server's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from upweight.errors import ConfigError

_NESTED = {"lora_rank": ("lora", "rank"), "lora_alpha": ("lora", "alpha"), "max_tokens": ("sampling", "max_tokens")}


def method_object(given: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """`given`: JSON, or a file with JSON: the whole method object or its reinforcement part. Options that are set beat it.

    Raises ConfigError for text that is no JSON object and for a reinforcement job without batch size.
    """
    method = _whole(_parse(given)) if given else _whole({})
    if method["type"] != "reinforcement":
        raise ConfigError(f"--method: type is {method['type']!r}; jobs create makes jobs of type 'reinforcement'")
    settings = dict(method.get("reinforcement") or {})
    for name, value in options.items():
        if value is None:
            continue
        if name in _NESTED:
            outer, inner = _NESTED[name]
            settings[outer] = {**(settings.get(outer) or {}), inner: value}
        else:
            settings[name] = value
    if "batch_size" not in settings:
        raise ConfigError("batch_size is missing: give --batch-size, or put it into --method")
    return {**method, "reinforcement": settings}


def _whole(value: dict[str, Any]) -> dict[str, Any]:
    return value if "type" in value else {"type": "reinforcement", "reinforcement": value}


def _parse(given: str) -> dict[str, Any]:
    is_text = given.lstrip().startswith("{")
    try:
        value = json.loads(given if is_text else Path(given).expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"--method {given}: {error.strerror}; give a file or a JSON object") from error
    except ValueError as error:
        raise ConfigError(f"--method {'text' if is_text else given} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--method {given}: a JSON object is needed, it holds {type(value).__name__}")
    return value
