"""Answers → values or exceptions."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from upweight.api_client.exceptions import (
    APIError,
    BadRequestError,
    InformationalResponseError,
    InternalServerError,
    JsonParseError,
    NotFoundError,
    RedirectResponseError,
)

Model = TypeVar("Model", bound=BaseModel)

UNSPECIFIED = "Message is not specified"


def raise_for_status(response: httpx.Response) -> None:
    """Raise the exception that belongs to the status; a 2xx body must be JSON."""
    status = response.status_code
    if status < 200:
        raise InformationalResponseError(f"Status code: {status}", response)
    if status < 300:
        _require_json(response)
        return
    if status < 400:
        raise RedirectResponseError(f"Status code: {status}", response)
    if status < 500:
        error_class = NotFoundError if status == 404 else BadRequestError
        raise error_class(_message(response), response)
    raise InternalServerError(f"Status code: {status}", response)


def parse(model: type[Model], response: httpx.Response) -> Model:
    """The body as `model`.

    Raises:
        APIError: naming the fields that do not fit.
    """
    try:
        return model.model_validate(response.json())
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
        raise APIError(
            f"{_url(response)} answered something that is no {model.__name__}: {problems}", response
        ) from error


def _require_json(response: httpx.Response) -> None:
    try:
        response.json()
    except ValueError as error:
        message = f"{_url(response)} answered {response.status_code} with a body that is not JSON"
        raise JsonParseError(message, response) from error


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        body = None
    text = _text_of(body) if isinstance(body, dict) else None
    if text is not None:
        return text
    if response.status_code == 404:
        return UNSPECIFIED if body is not None else "Resource not found"
    if response.status_code in (400, 422):
        return UNSPECIFIED
    return response.reason_phrase or UNSPECIFIED


def _text_of(body: dict[str, Any]) -> str | None:
    """`detail` (text, or objects with `msg`), else `error.message`."""
    detail, error = body.get("detail"), body.get("error")
    if isinstance(detail, str) and detail:
        return detail
    if isinstance(detail, list):
        messages = [item["msg"] for item in detail if isinstance(item, dict) and isinstance(item.get("msg"), str)]
        if messages:
            return "; ".join(messages)
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error["message"] or None
    return None


def _url(response: httpx.Response) -> str:
    try:
        return str(response.request.url)
    except RuntimeError:  # a response built by hand has no request
        return "The server"
