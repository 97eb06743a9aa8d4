"""Error bodies: `detail` everywhere, beside it the form that the client of the route reads."""

from __future__ import annotations

from typing import Any

_OPENAI = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """As OpenAI clients read it."""
    kind = _OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"detail": message, "error": {"message": message, "type": kind, "param": field, "code": None}}


def anthropic_error_body(status: int, message: str) -> dict[str, Any]:
    """As Anthropic clients read it."""
    kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "detail": message, "error": {"type": kind, "message": message}}


def reads_error_objects(path: str) -> bool:
    """Whether clients of OpenAI's or Anthropic's APIs use the public route: they show nothing of a body without `error`."""
    theirs = ("/v1/chat/", "/v1/completions", "/v1/messages", "/v1/models", "/v1/files", "/v1/fine_tuning/")
    return "/inference/" in path or path.startswith(theirs)


def is_anthropic(path: str) -> bool:
    """Whether a route answers as Anthropic's API does."""
    return path.endswith(("/messages", "/messages/count_tokens"))
