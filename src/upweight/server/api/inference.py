"""The inference routes below a job, and the same beside it, where the model's name picks the job: requests go to the job's worker, what it answers is remembered for the join.

Invariants:
* A completion is stored before its answer leaves, so a sample made from it always finds it.
* A request that meets a dying worker waits for the next one and is asked again; nothing of an answer was sent before.
* A client that goes away takes its request in the worker with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import OperationalError
from starlette.types import Receive, Scope, Send

from upweight.errors import StoreError
from upweight.server.api import openapi
from upweight.server.api.context import JobOf, Parts, PartsOf, ProjectOf, off_the_loop, parse_json, read_body
from upweight.server.api.errors import RETRY_AFTER, both_forms, text_of
from upweight.server.api.model_names import as_of_now, job_for_model
from upweight.server.api.served import StreamReader, served_of
from upweight.server.ascii_json import AsciiJSON
from upweight.server.error_bodies import is_anthropic
from upweight.server.reasons import reason_header
from upweight.server.refusals import Refusal
from upweight.server.store import completions
from upweight.server.store.jobs import Job

PREFIX = "/v1alpha1/fine_tuning/jobs/{job_id}"
MOST_ATTEMPTS = 5
MOST_BODY_MB = 32  # a worker reads a body while its engine waits
log = logging.getLogger(__name__)

OF_JOB = PREFIX + "/inference/openai/v1"

router = APIRouter()


@router.post(PREFIX + "/render")
async def render(request: Request, job: JobOf, parts: PartsOf) -> Response:
    return await _forward(request, job, parts, "POST", "/render", await read_body(request, most_mb=MOST_BODY_MB))


@router.get(OF_JOB + "/models")
async def models(request: Request, job: JobOf, parts: PartsOf) -> Response:
    return await _forward(request, job, parts, "GET", "/openai/v1/models", b"")


@router.get(OF_JOB + "/models/{name:path}")
async def model(name: str, request: Request, job: JobOf, parts: PartsOf) -> Response:
    return await _forward(request, job, parts, "GET", f"/openai/v1/models/{quote(name)}", b"")


@router.post(OF_JOB + "/chat/completions", openapi_extra=openapi.ASKED)
@router.post(OF_JOB + "/completions", openapi_extra=openapi.ASKED)
@router.post(OF_JOB + "/messages", openapi_extra=openapi.ASKED)
@router.post(OF_JOB + "/messages/count_tokens", openapi_extra=openapi.ASKED)
async def complete_for_job(request: Request, job: JobOf, parts: PartsOf) -> Response:
    parts.contacts.note(job.id, "completion")
    body, asked = await _read(request, parts)
    return await _complete(request, job, parts, "/openai" + request.url.path.rpartition("/openai")[2], body, asked)


@router.post("/v1/chat/completions", openapi_extra=openapi.ASKED)
@router.post("/v1/completions", openapi_extra=openapi.ASKED)
@router.post("/v1/messages", openapi_extra=openapi.ASKED)
@router.post("/v1/messages/count_tokens", openapi_extra=openapi.ASKED)
async def complete_for_model(request: Request, parts: PartsOf, project: ProjectOf) -> Response:
    body, asked = await _read(request, parts)
    job = await parts.database.read(lambda c: job_for_model(c, project, asked.get("model")))
    return await _complete(request, job, parts, "/openai" + request.url.path, body, asked)


async def _read(request: Request, parts: Parts) -> tuple[bytes, dict[str, Any]]:
    body = await read_body(request, most_mb=MOST_BODY_MB)
    try:
        return body, await off_the_loop(parts, len(body), parse_json, body)
    except Refusal as refusal:
        raise Refusal(400, refusal.text) from refusal  # what clients of inference APIs expect of a bad body


async def _complete(
    request: Request, job: Job, parts: Parts, path: str, body: bytes, asked: dict[str, Any]
) -> Response:
    if asked.get("stream") is True:
        return await _stream(request, job, parts, path, body, asked)
    return await _forward(request, job, parts, "POST", path, body, asked)


async def _forward(
    request: Request, job: Job, parts: Parts, method: str, path: str, body: bytes, asked: dict[str, Any] | None = None
) -> Response:
    upstream = await _ask(request, job, parts, method, path, body)
    content = upstream.content
    if upstream.status_code >= 400:
        return _error(request, upstream)
    if asked is not None and not job.is_over:
        await _remember(parts, job, asked, await off_the_loop(parts, len(content), json.loads, content))
    return Response(content, upstream.status_code, media_type=upstream.headers.get("content-type"))


async def _stream(request: Request, job: Job, parts: Parts, path: str, body: bytes, asked: dict[str, Any]) -> Response:
    upstream = await _ask(request, job, parts, "POST", path, body, stream=True)
    if upstream.status_code >= 400:
        return _error(request, upstream)
    return PassedOn(upstream, _pass_on(request, upstream, job, parts, asked))


class PassedOn(StreamingResponse):
    """A stream of the worker, which ends with the response, also when a client that left lets it never begin."""

    def __init__(self, upstream: httpx.Response, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, upstream.status_code, media_type=upstream.headers.get("content-type"))
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._upstream.aclose()


async def _pass_on(
    request: Request, upstream: httpx.Response, job: Job, parts: Parts, asked: dict[str, Any]
) -> AsyncIterator[bytes]:
    """Events as they come; the one that ends a choice only after that choice was stored."""
    reader = StreamReader()
    try:
        async for chunk in upstream.aiter_raw():
            for event in reader.feed(chunk):
                if (done := reader.take(event)) and not job.is_over:
                    await _remember(parts, job, asked, {"choices": done})
                yield event
        yield reader.rest
    except httpx.TransportError as error:
        yield _error_event(request, f"the worker broke off: {error!r}; try again")
    except (StoreError, OperationalError) as error:
        log.error("store: %s", error)
        yield _error_event(request, "the store cannot answer now, the end of this answer was not stored; try again")


def _error_event(request: Request, message: str) -> bytes:
    body = both_forms(request, 503, {"detail": message})
    name = b"event: error\n" if is_anthropic(request.url.path) else b""
    return name + b"data: " + json.dumps(body).encode() + b"\n\n"


async def _remember(parts: Parts, job: Job, asked: dict[str, Any], answer: dict[str, Any]) -> None:
    if served := served_of(asked, answer):
        await parts.database.write(lambda c: completions.remember(c, job.id, served))


async def _ask(
    request: Request, job: Job, parts: Parts, method: str, path: str, body: bytes, *, stream: bool = False
) -> httpx.Response:
    """The worker's answer, read but for a stream. A worker that breaks off before is followed by the next one."""
    broken: Exception | None = None
    for _ in range(MOST_ATTEMPTS):
        current = await parts.database.read(lambda c: as_of_now(c, job))
        worker = await _until_gone(request, parts.supervisor.serving(current))
        call = worker.client.build_request(
            method,
            path,
            content=body,
            headers={"content-type": "application/json"},
            timeout=httpx.Timeout(parts.settings.inference_timeout, connect=10.0),
        )
        try:
            return await _until_gone(request, _send(worker.client, call, stream=stream))
        except httpx.TimeoutException as error:
            raise Refusal(504, f"the worker did not answer within {parts.settings.inference_timeout:g} s") from error
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed under the call
            broken = error
            await asyncio.sleep(0.1)
    raise Refusal(503, f"the worker broke off {MOST_ATTEMPTS} times, last: {broken!r}; try again")


async def _send(client: httpx.AsyncClient, call: httpx.Request, *, stream: bool) -> httpx.Response:
    upstream = await client.send(call, stream=True)
    if stream and upstream.status_code < 400:
        return upstream
    try:
        await upstream.aread()
    finally:
        await upstream.aclose()
    return upstream


async def _until_gone(request: Request, work: Any) -> Any:
    """The result of `work`, which is cancelled when the client disconnects (its body was read before)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal(499, "the client went away")
        return task.result()
    finally:
        for one in (task, gone):
            if not one.done():
                one.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await one


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _error(request: Request, upstream: httpx.Response) -> Response:
    """The worker's refusal, in both forms."""
    try:
        told = json.loads(upstream.content)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        told = {"detail": upstream.text[:500] or upstream.reason_phrase}
    body = both_forms(request, upstream.status_code, told)
    headers = reason_header(text_of(body["detail"]))
    if retry := upstream.headers.get("retry-after", RETRY_AFTER.get(upstream.status_code)):
        headers["Retry-After"] = retry
    return AsciiJSON(body, upstream.status_code, headers)
