"""What makes a script a command: `--help`, and one line instead of a traceback for what is missing or cannot work.

Exit codes: 2 for what the user has to set first, 1 for a run that failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from upweight.api_client import MissingAPIKeyError, TokenFactory
from upweight.api_client._client import API_KEY_ENV_VAR, BASE_URL_ENV_VAR
from upweight.errors import UpweightError
from upweight.rollout import RolloutRunner, RunSummary

S = TypeVar("S", bound=BaseSettings)

JOB_ENV_VAR = "TOKENFACTORY_ROLLOUT_JOB_ID"
REMEDY = "export it; `upweight jobs create` prints the line"


def begin(description: str | None) -> None:
    """Answer `--help` with `description`, refuse other arguments, and show log records."""
    argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    show_logs()


def show_logs() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request


def client_from_environment() -> TokenFactory:
    """A client of the server that the environment names; unlike `TokenFactory()` it wants to be told which one."""
    if not os.environ.get(BASE_URL_ENV_VAR, "").strip():
        refuse(f"{BASE_URL_ENV_VAR} is not set; {REMEDY}")
    try:
        return TokenFactory()
    except MissingAPIKeyError:
        refuse(f"{API_KEY_ENV_VAR} is not set; {REMEDY}")
    except ValueError as error:
        refuse(f"{BASE_URL_ENV_VAR}: {error}")  # it names the value and how an address looks


def from_environment(settings: type[S], **given: Any) -> S:
    """Settings from the environment; what is `given` wins."""
    try:
        return settings(**given)
    except ValidationError as error:
        prefix = str(settings.model_config.get("env_prefix", ""))
        refuse("; ".join(_line(prefix, e["loc"], e["type"], e["msg"], e["input"]) for e in error.errors()))


def _line(prefix: str, place: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    variable = f"{prefix}{'.'.join(map(str, place))}".upper()
    if kind == "missing":
        return f"{variable} is not set; {REMEDY if variable == JOB_ENV_VAR else 'export it'}"
    return f"{variable} is {value!r}: {message.removeprefix('Value error, ')}"


def finish(runner: RolloutRunner) -> RunSummary:
    """The summary of the whole run; one line if it fails."""
    try:
        return runner.run()
    except UpweightError as error:
        stop(str(error), 1)


def refuse(line: str) -> NoReturn:
    stop(line, 2)


def stop(line: str, code: int) -> NoReturn:
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(code)
