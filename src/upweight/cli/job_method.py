"""The method object of a new job, from `--method` and single options. Defaults, names and ranges are the server's."""

from __future__ import annotations

from typing import Any

from upweight.cli.json_option import is_json, read_json
from upweight.errors import ConfigError

KINDS = ("reinforcement", "supervised", "dpo")
_NESTED = {"lora_rank": ("lora", "rank"), "lora_alpha": ("lora", "alpha"), "max_tokens": ("sampling", "max_tokens")}
# Option → key of the hyperparameters, for kinds that train on a file.
_OF_FILE_JOBS = {
    "supervised": {"batch_size": "batch_size", "learning_rate": "learning_rate", "epochs": "n_epochs"}
    | {"lora_rank": "lora_r", "lora_alpha": "lora_alpha"},
    "dpo": {"batch_size": "batch_size", "learning_rate": "learning_rate", "epochs": "n_epochs", "beta": "beta"}
    | {name: name for name in ("lr_schedule", "warmup_steps", "checkpoint_every", "seed", "lora_rank", "lora_alpha")},
}


def method_object(
    given: str | None, options: dict[str, Any], *, kind: str | None = None, has_file: bool = False
) -> dict[str, Any]:
    """`given`: JSON, or a file with JSON: the whole method object or its settings. Options that are set beat it.

    `kind` is asked for by name; without it the object's own type holds, else supervised for a job with a file. Raises ConfigError
    for text that is no JSON object, for options that the kind has not, and for a reinforcement job without batch size.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--type {kind} is unknown; known: {', '.join(KINDS)}")
    value = _parse(given) if given else {}
    method = _whole(value, kind or ("supervised" if has_file else "reinforcement"))
    if kind is not None and method["type"] != kind:
        raise ConfigError(f"--type is {kind}, the type in --method is {method['type']!r}; give one of them")
    if method["type"] in _OF_FILE_JOBS:
        if not has_file:
            raise ConfigError(f"a {method['type']} job trains on a file: give --training-file")
        return _with_hyperparameters(method, options)
    if method["type"] != "reinforcement":
        raise ConfigError(f"--method: type is {method['type']!r}; jobs create makes jobs of type {', '.join(KINDS)}")
    settings = _with_options(dict(method.get("reinforcement") or {}), options)
    if "batch_size" not in settings:
        raise ConfigError("batch_size is missing: give --batch-size, or put it into --method")
    return {**method, "reinforcement": settings}


def _with_hyperparameters(method: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    kind = method["type"]
    names = _OF_FILE_JOBS[kind]
    given = {name: value for name, value in options.items() if value is not None}
    if others := [name for name in given if name not in names]:
        raise ConfigError(f"--{others[0].replace('_', '-')} is not an option of a {kind} job; leave it out")
    outer = dict(method.get(kind) or {})
    hyperparameters = dict(outer.get("hyperparameters") or {})
    if kind == "dpo":
        hyperparameters = _with_options(hyperparameters, {names[name]: value for name, value in given.items()})
    else:
        hyperparameters |= {names[name]: _plain(value) for name, value in given.items()}
        hyperparameters |= {"lora": True} if "lora_rank" in given or "lora_alpha" in given else {}
    return {**method, kind: {**outer, "hyperparameters": hyperparameters}}


def _with_options(settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if value is None:
            continue
        if name in _NESTED:
            outer, inner = _NESTED[name]
            settings[outer] = {**(settings.get(outer) or {}), inner: value}
        else:
            settings[name] = value
    return settings


def _plain(value: Any) -> Any:
    """8.0 as 8: the option is a number, the hyperparameter a whole one."""
    return int(value) if isinstance(value, float) and value.is_integer() and value >= 1 else value


def _whole(value: dict[str, Any], kind: str) -> dict[str, Any]:
    if "type" in value:
        return value
    return {"type": kind, kind: {"hyperparameters": value} if kind in _OF_FILE_JOBS else value}


def _parse(given: str) -> dict[str, Any]:
    value = read_json("--method", given, is_text=is_json(given))
    if not isinstance(value, dict):
        raise ConfigError(f"--method {given}: a JSON object is needed, it holds {type(value).__name__}")
    return value
