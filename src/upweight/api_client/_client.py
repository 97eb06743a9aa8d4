"""HTTP client of the job API.

Invariants
1. All attempts of one call carry the same headers; a POST carries one `Idempotency-Key`.
2. The key is never shown by `repr`. It does travel in a pickle: worker processes need it.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import cached_property
from types import TracebackType
from typing import Any

import httpx
import tenacity

from upweight.api_client._responses import raise_for_status
from upweight.api_client._retry import limited_timeout, retrying
from upweight.api_client.exceptions import MissingAPIKeyError
from upweight.api_client.resources import V1, V1Alpha1

ENV_PREFIX = "TOKENFACTORY_"
BASE_URL_ENV_VAR = f"{ENV_PREFIX}BASE_URL"
API_KEY_ENV_VAR = f"{ENV_PREFIX}API_KEY"
DEFAULT_BASE_URL = "https://api.tokenfactory.nebius.com"

_INFERENCE_MARK = "/inference/openai/"
_restore_lock = threading.Lock()


class TokenFactory:
    """Client of the job API; thread-safe, picklable, a context manager.

    Args:
        base_url: `http(s)://host…`; else `TOKENFACTORY_BASE_URL`, else the public service.
        api_key: else `TOKENFACTORY_API_KEY`.
        httpx_client_factory: makes the HTTP client; must be picklable if the client is pickled. Default `httpx.Client`.
        max_retries: further attempts after the first one.
        tenacity_retry_wait: replaces the default waits (1, 2, 4, 8, 10 … s ± 20 %, `Retry-After` respected).

    Raises:
        MissingAPIKeyError: no key, or a blank one.
        ValueError: `base_url` has no http(s) scheme or no host, the key cannot stand in a header, `max_retries` is out of range.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        httpx_client_factory: Callable[[], httpx.Client] | None = None,
        max_retries: int = 3,
        tenacity_retry_wait: tenacity.wait.wait_base | None = None,
    ) -> None:
        self._base_url = _resolve_base_url(base_url)
        self._api_key = _resolve_api_key(api_key)
        self._factory = httpx_client_factory or httpx.Client
        self._max_retries = _checked_retries(max_retries)
        self._wait = tenacity_retry_wait
        self._closed = False
        self._httpx_client: httpx.Client | None = self._factory()

    @property
    def base_url(self) -> str:
        return self._base_url

    @property
    def api_key(self) -> str:
        return self._api_key

    @property
    def httpx_client(self) -> httpx.Client:
        if self._closed:
            raise RuntimeError("client is closed")
        with _restore_lock:
            if self._httpx_client is None:  # only after unpickling
                self._httpx_client = self._factory()
            return self._httpx_client

    @cached_property
    def v1(self) -> V1:
        return V1(self)

    @cached_property
    def v1alpha1(self) -> V1Alpha1:
        return V1Alpha1(self)

    def get(self, url: str, **kw: Any) -> httpx.Response:
        return self.request("GET", url, **kw)

    def post(self, url: str, **kw: Any) -> httpx.Response:
        return self.request("POST", url, **kw)

    def request(self, method: str, url: str, **kw: Any) -> httpx.Response:
        """Send one call, repeated where that may help; keywords are those of `httpx.Client.request`.

        Raises:
            APIError: the answer is not a 2xx with a JSON body.
            httpx.HTTPError: no answer arrived.
            RuntimeError: the client is closed.
        """
        client = self.httpx_client
        headers = self._headers(method, kw.pop("headers", None))
        if kw.get("json") is not None:
            kw["content"] = _encode(kw.pop("json"))
            headers.setdefault("Content-Type", "application/json")
        is_inference = _INFERENCE_MARK in url

        def attempt() -> httpx.Response:
            own = httpx.Timeout(kw["timeout"]) if "timeout" in kw else client.timeout
            timeout = limited_timeout(own)
            limits = {} if timeout is None or is_inference else {"timeout": timeout}
            response = client.request(method, url, headers=headers, **{**kw, **limits})
            raise_for_status(response)
            return response

        return retrying(self._max_retries, self._wait, repeat_read_timeouts=not is_inference)(attempt)

    def _headers(self, method: str, given: Mapping[str, str] | None) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self._api_key}"}
        if method.upper() == "POST":
            headers["Idempotency-Key"] = uuid.uuid4().hex
        given = dict(given or {})
        overridden = {name.lower() for name in given}
        return {**{name: value for name, value in headers.items() if name.lower() not in overridden}, **given}

    def close(self) -> None:
        """Close the HTTP client; further calls raise `RuntimeError`."""
        self._closed = True
        if self._httpx_client is not None:
            self._httpx_client.close()

    def __enter__(self) -> TokenFactory:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TokenFactory(base_url={self._base_url!r})"

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key not in ("v1", "v1alpha1")}
        return {**kept, "_httpx_client": None, "_closed": False}


def _encode(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _resolve_base_url(given: str | None) -> str:
    url = given if given is not None else (os.environ.get(BASE_URL_ENV_VAR, "").strip() or DEFAULT_BASE_URL)
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url {url!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"base_url {url!r} needs a scheme and a host, as in https://host or http://127.0.0.1:8000")
    return url.rstrip("/")


def _resolve_api_key(given: str | None) -> str:
    key = (given if given is not None else os.environ.get(API_KEY_ENV_VAR, "")).strip()
    if not key:
        raise MissingAPIKeyError(f"No API key: pass api_key or set {API_KEY_ENV_VAR}")
    wrong = next((place for place, c in enumerate(key, 1) if not (" " <= c <= "~")), None)
    if wrong is not None:  # told without the key, which httpx would show
        source = "api_key" if given is not None else API_KEY_ENV_VAR
        raise ValueError(
            f"{source} cannot be sent: character {wrong} of {len(key)} (U+{ord(key[wrong - 1]):04X}) is no printable "
            "ASCII; copy the key again"
        )
    return key


def _checked_retries(given: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(f"max_retries is {given!r}; it must be a whole number from 0")
    return given
