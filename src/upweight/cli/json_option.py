"""An option that is JSON or a file with JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from upweight.errors import ConfigError


def is_json(given: str) -> bool:
    """Whether it is the JSON itself: an object or a list."""
    return given.lstrip().startswith(("{", "["))


def read_json(option: str, given: str, *, is_text: bool, forms: str = "a file or JSON") -> Any:
    """The value. Raises ConfigError, which shows a file's name and never JSON itself: that may hold a secret."""
    try:
        return json.loads(given if is_text else Path(given).expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"{option} {given}: {error.strerror}; give {forms}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} {'text' if is_text else given} is not JSON: {error}") from error
