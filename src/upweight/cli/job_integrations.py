"""The `integrations` of a new job, from `--integration`, given once a tracker.

Invariants
- A login of the environment is sent only with the short form of its own tracker; JSON is sent as it is written.
- No message shows what may be a secret.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from upweight.cli.json_option import is_json, read_json
from upweight.errors import ConfigError

OPTION = "--integration"
FORMS = "wandb:PROJECT, wandb:ENTITY/PROJECT, mlflow:URL, JSON, or a file with JSON"


def integrations(given: Sequence[str]) -> list[dict[str, Any]]:
    """One object per tracker, as the API takes them. Raises ConfigError; fields and kinds are the server's to check."""
    return [one for text in given for one in _integrations(text)]


def _integrations(given: str) -> list[dict[str, Any]]:
    kind, colon, rest = given.partition(":")
    if colon and kind in _SHORT:
        if not rest.strip():
            raise ConfigError(f"{OPTION} {given}: nothing stands behind the colon; give {FORMS}")
        return [{"type": kind, kind: _SHORT[kind](rest.strip())}]
    value = read_json(OPTION, given, is_text=is_json(given), forms=FORMS)
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"{OPTION} holds JSON that is no object: give {FORMS}")
    return found


def _wandb(place: str) -> dict[str, Any]:
    entity, slash, project = place.rpartition("/")
    return {"project": project, **({"entity": entity} if slash else {}), **_login(api_key="WANDB_API_KEY")}


def _mlflow(place: str) -> dict[str, Any]:
    login = _login(username="MLFLOW_TRACKING_USERNAME", password="MLFLOW_TRACKING_PASSWORD")
    return {"tracking_uri": place, **login}


def _login(**variables: str) -> dict[str, str]:
    return {field: value for field, name in variables.items() if (value := os.environ.get(name, "").strip())}


_SHORT = {"wandb": _wandb, "mlflow": _mlflow}
