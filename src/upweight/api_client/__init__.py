"""The job API from the client's side."""

from upweight.api_client._client import TokenFactory
from upweight.api_client.exceptions import (
    APIError,
    BadRequestError,
    InformationalResponseError,
    InternalServerError,
    JsonParseError,
    MissingAPIKeyError,
    NotFoundError,
    RedirectResponseError,
)

__all__ = [
    "APIError",
    "BadRequestError",
    "InformationalResponseError",
    "InternalServerError",
    "JsonParseError",
    "MissingAPIKeyError",
    "NotFoundError",
    "RedirectResponseError",
    "TokenFactory",
]
