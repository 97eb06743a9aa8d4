"""Which server a command talks to, and errors of that talk in one line.

Invariants
- An option beats the environment (TOKENFACTORY_BASE_URL, TOKENFACTORY_API_KEY), which beats the home folder.
- The key of the home folder is only ever sent to the server that the home folder names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upweight.cli.checks import home
from upweight.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from upweight.api_client import TokenFactory
    from upweight.api_client.exceptions import APIError

URL_VARIABLE = "TOKENFACTORY_BASE_URL"
KEY_VARIABLE = "TOKENFACTORY_API_KEY"
JOB_VARIABLE = "TOKENFACTORY_ROLLOUT_JOB_ID"
TIMEOUT_S = 30.0
START = "start one with: upweight serve"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A server's address and key, and where each was found."""

    url: str
    url_from: str  # "--url", the variable, or the path of server.json
    key: str
    key_from: str  # "--key", the variable, or the path of api_key

    @property
    def key_file(self) -> str | None:
        """The file that holds the key, when it came from one."""
        return self.key_from if Path(self.key_from).is_absolute() else None

    @property
    def is_local(self) -> bool:
        """Whether the home folder named the server."""
        return Path(self.url_from).is_absolute()


def find_place(url: str | None, key: str | None) -> Place:
    """Raises ServerError when no server is named, ConfigError when there is no key for it."""
    found_url, url_from = _url(url)
    found_key, key_from = _key(key, found_url)
    return Place(url=found_url.rstrip("/"), url_from=url_from, key=found_key, key_from=key_from)


@contextmanager
def session(url: str | None, key: str | None) -> Iterator[tuple[TokenFactory, Place]]:
    """A client of the server; what goes wrong inside the block is raised as one line that says what to do."""
    import httpx

    from upweight.api_client.exceptions import APIError

    place = find_place(url, key)
    try:
        with _client(place) as client:
            yield client, place
    except httpx.TimeoutException as error:
        raise ServerError(f"the server at {place.url} did not answer in time ({type(error).__name__})") from error
    except httpx.HTTPError as error:
        raise ServerError(_unreachable(place, error)) from error
    except APIError as error:
        raise _explained(place, error) from error


def _client(place: Place) -> TokenFactory:
    import httpx

    from upweight.api_client import TokenFactory

    # A proxy of the environment is meant for the network, not for the server on this machine.
    factory = partial(httpx.Client, timeout=TIMEOUT_S, trust_env=not place.is_local)
    try:
        return TokenFactory(place.url, place.key, httpx_client_factory=factory, max_retries=0)
    except ValueError as error:
        told = str(error)
        source = place.key_from if told.startswith("api_key") else place.url_from
        raise ConfigError(f"{source}: {told}") from error


def _url(option: str | None) -> tuple[str, str]:
    if option:
        return option, "--url"
    if given := os.environ.get(URL_VARIABLE, "").strip():
        return given, URL_VARIABLE
    if told := _server_file():
        return told, str(home().absolute() / "server.json")
    raise ServerError(f"no server is running in {home()}: {START}, or name one with --url or {URL_VARIABLE}")


def _key(option: str | None, url: str) -> tuple[str, str]:
    if option:
        return option, "--key"
    if given := os.environ.get(KEY_VARIABLE, "").strip():
        return given, KEY_VARIABLE
    file = home().absolute() / "api_key"
    if _server_file() != url.rstrip("/"):
        raise ConfigError(f"no API key for {url}: set {KEY_VARIABLE} or give --key")
    try:
        key = file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"API key {file}: {error.strerror}; set {KEY_VARIABLE} or give --key") from error
    return key, str(file)


def _server_file() -> str | None:
    """The address in server.json of the home folder, None when no server runs there."""
    file = home() / "server.json"
    try:
        return str(json.loads(file.read_text())["url"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{file} cannot be used ({error!r}): delete it, then {START}") from error


def _unreachable(place: Place, error: Exception) -> str:
    reason = str(error) or type(error).__name__
    if place.is_local:
        return f"no server answers at {place.url} ({reason}), though {place.url_from} names it: {START}"
    return f"no server answers at {place.url}, given by {place.url_from} ({reason})"


def _explained(place: Place, error: APIError) -> Exception:
    response = error.response
    if response is None:
        return error
    if response.status_code in (401, 403):
        return ServerError(f"{place.url} does not accept the API key of {place.key_from}: {error.msg}")
    if 300 <= response.status_code < 400:
        moved = response.headers.get("location", "")
        return ServerError(f"{place.url} answered {response.status_code}: it has moved; give its address ({moved})")
    if response.status_code >= 500:
        return ServerError(f"{place.url} answered {response.status_code}: {_detail(response) or error.msg}")
    return error


def _detail(response: Any) -> str:
    try:
        told = response.json()
    except ValueError:
        return ""
    return str(told.get("detail", "")) if isinstance(told, dict) else ""
