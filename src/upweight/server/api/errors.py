"""Error answers: `{"detail": …}` everywhere; on inference routes also the form that OpenAI or Anthropic clients read."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError, OperationalError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from upweight.errors import StoreError
from upweight.server.ascii_json import AsciiJSON
from upweight.server.error_bodies import anthropic_error_body, error_body, is_anthropic, reads_error_objects
from upweight.server.home import NO_ROOM, SHORT
from upweight.server.reasons import reason_header
from upweight.server.refusals import Refusal

log = logging.getLogger(__name__)

LONGEST_PATH = 200  # characters that an answer repeats
RETRY_AFTER = {503: "2", 429: "1"}  # seconds


def answer(request: Request, status: int, detail: Any, **extra: Any) -> AsciiJSON:
    content = {"detail": detail, **extra}
    if reads_error_objects(request.url.path):
        content = both_forms(request, status, content)
    headers = reason_header(text_of(detail))
    if status in RETRY_AFTER:
        headers["Retry-After"] = RETRY_AFTER[status]
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return AsciiJSON(content, status, headers)


def both_forms(request: Request, status: int, content: dict[str, Any]) -> dict[str, Any]:
    """Add `error` to a body that has `detail`, or `detail` to one that has `error`."""
    if isinstance(content.get("error"), dict):
        return {"detail": str(content["error"].get("message", "")), **content}
    message = text_of(content.get("detail", ""))
    if is_anthropic(request.url.path):
        return {**anthropic_error_body(status, message), **content}
    return {**error_body(status, message), **content}


def text_of(detail: Any) -> str:
    return "; ".join(str(item.get("msg", item)) for item in detail) if isinstance(detail, list) else str(detail)


def _told(request: Request, error: HTTPException) -> str:
    """Those of a path or method without a route come with two words."""
    what = f"{request.method} {request.url.path[:LONGEST_PATH]!r}"
    if error.status_code == 404 and error.detail == "Not Found":
        return f"{what} is no route of this server; GET /openapi.json lists them"
    if error.status_code == 405:
        return f"{what} is not offered; allowed: {(error.headers or {}).get('Allow', 'nothing')}"
    return error.detail


def install(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def _refusal(request: Request, refusal: Refusal) -> AsciiJSON:
        return answer(request, refusal.status, refusal.detail, **refusal.extra)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> AsciiJSON:
        found = answer(request, error.status_code, _told(request, error))
        found.headers.update(error.headers or {})  # of a 405: what is allowed
        return found

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> AsciiJSON:
        items = [
            {"loc": list(e["loc"]), "msg": f"{e['loc'][-1]} = {e['input']!r}: {e['msg']}", "type": e["type"]}
            for e in error.errors()
        ]
        return answer(request, 422, items)

    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, error: ClientDisconnect) -> AsciiJSON:
        return answer(request, 499, "the client went away before its request was read")  # for nobody: not a bug of ours

    @app.exception_handler(DataError)
    async def _data(request: Request, error: DataError) -> AsciiJSON:
        return answer(request, 422, f"the store cannot hold a text or number of this request: {error.orig}")

    @app.exception_handler(StoreError)
    @app.exception_handler(OperationalError)
    async def _store(request: Request, error: Exception) -> AsciiJSON:
        log.error("store: %s", error)
        text = str(error.orig) if isinstance(error, OperationalError) else str(error)
        return answer(request, 503, f"the store cannot answer now: {text}; nothing was stored, try again")

    @app.exception_handler(OSError)
    async def _disk(request: Request, error: OSError) -> AsciiJSON:
        if error.errno in SHORT:
            log.error("machine: %s", error)
            return answer(request, 503, f"the server's machine is short of something now: {error.strerror}; try again")
        if error.errno not in NO_ROOM:
            log.error("%s %s", request.method, request.url.path, exc_info=error)
            return await _bug(request, error)
        log.error("disk: %s", error)
        return answer(request, 507, f"the server cannot write to its disk: {error.strerror}; nothing was stored")

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> AsciiJSON:
        return answer(request, 500, f"internal error: {type(error).__name__}; the server's log says more")
