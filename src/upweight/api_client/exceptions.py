"""What the API client raises. `TokenFactoryError` itself lives in `upweight.errors`."""

from __future__ import annotations

import httpx

from upweight.errors import TokenFactoryError


class MissingAPIKeyError(TokenFactoryError):
    """Neither the argument nor the environment gives an API key."""


class APIError(TokenFactoryError):
    """The server's answer is an error or cannot be used; `response` is that answer, where there is one."""

    def __init__(self, msg: str, response: httpx.Response | None = None) -> None:
        super().__init__(msg)
        self.msg = msg
        self.response = response

    def __reduce__(self) -> tuple[type[APIError], tuple[str]]:
        return type(self), (self.msg,)  # an httpx response does not travel between processes


class InformationalResponseError(APIError):
    """1xx."""


class RedirectResponseError(APIError):
    """3xx; redirects are not followed."""


class BadRequestError(APIError):
    """4xx other than 404."""


class NotFoundError(APIError):
    """404."""


class InternalServerError(APIError):
    """5xx."""


class JsonParseError(APIError):
    """A 2xx answer whose body is not JSON."""
