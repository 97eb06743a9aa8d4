"""What every route needs: the parts of the server, who asks, and the request's body."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request
from sqlalchemy import Connection

from upweight.server.api.reading import UploadReader
from upweight.server.api.turns import Turns
from upweight.server.contacts import Contacts
from upweight.server.home import Home
from upweight.server.rates import Rates
from upweight.server.refusals import Refusal, invalid
from upweight.server.settings import Settings
from upweight.server.store import keys, repeats
from upweight.server.store.database import Database
from upweight.server.store.jobs import Job, get_job
from upweight.server.supervision.supervisor import Supervisor

ResolveModel = Callable[[str], Any]
KEY_HOLDS = 3.0  # seconds that a key is believed without asking the store: it may be revoked meanwhile
LONGEST_REPEAT_KEY = 255  # characters
MOST_OF_ORDERS = 256 * 1024  # bytes; parsed within milliseconds
SMALL_BODY = 64 * 1024  # bytes; parsing less than this is quicker than a trip to a thread


@dataclass(kw_only=True)
class Parts:
    """The running server."""

    settings: Settings
    home: Home
    database: Database
    supervisor: Supervisor
    rates: Rates
    resolve_model: ResolveModel
    projects: dict[str, tuple[str, float]] = field(default_factory=dict)  # hash of a key → its project, when read
    contacts: Contacts = field(default_factory=Contacts)
    reader: UploadReader = field(default_factory=UploadReader)
    # (project, job) → whether its samples must name their groups; it never changes
    needs_task: dict[tuple[str, str], bool] = field(default_factory=dict)
    upload_turns: Turns = field(default_factory=Turns)
    exporting: asyncio.Lock = field(default_factory=asyncio.Lock)  # each export is a process that holds a model
    parsing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    # Apart from `parsing`: no upload of samples waits for a training file to be checked.
    checking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))


def parts_of(request: Request) -> Parts:
    return request.app.state.parts


async def project_of(request: Request) -> str:
    """The project that the request's key opens. Raises Refusal 401."""
    parts, key = parts_of(request), _key_of(request)
    hashed = keys.hash_key(key)
    project, read_at = parts.projects.get(hashed, (None, 0.0))
    if project is None or time.monotonic() - read_at > KEY_HOLDS:
        project = await parts.database.read(lambda c: keys.project_of(c, key))
        if project is None:
            parts.projects.pop(hashed, None)
            raise Refusal(401, "the API key is not known to this server; use the one in its home folder (file api_key)")
        parts.projects[hashed] = (project, time.monotonic())
    parts.rates.take(project)
    return project


def _key_of(request: Request) -> str:
    """The bearer key, or that of `x-api-key`, the header of Anthropic's clients."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else ""
    key = key or request.headers.get("x-api-key", "").strip()
    if not key:
        raise Refusal(401, "no API key: send the header 'Authorization: Bearer <key>'")
    return key


PartsOf = Annotated[Parts, Depends(parts_of)]
ProjectOf = Annotated[str, Depends(project_of)]


async def job_of(job_id: str, parts: PartsOf, project: ProjectOf) -> Job:
    return await parts.database.read(lambda c: get_job(c, job_id, project))


JobOf = Annotated[Job, Depends(job_of)]


async def read_body(request: Request, *, most_mb: int | None = None) -> bytes:
    """The whole body. Raises Refusal 413 as soon as it is larger than `max_body_mb`, or than `most_mb` if that is less."""
    limit = parts_of(request).settings.max_body_mb
    what = "send fewer samples per request" if most_mb is None else "send fewer prompts per request"
    limit = limit if most_mb is None else min(limit, most_mb)
    return await _limited_body(request, limit * 1_000_000, f"the body is larger than {limit} MB; {what}")


async def read_small_body(request: Request) -> bytes:
    """That of an order, a few settings or numbers: it is read on the event loop, so none may be long enough to hold that up.

    Raises Refusal 413 as soon as it is larger than `MOST_OF_ORDERS`.
    """
    text = f"the body is larger than {MOST_OF_ORDERS // 1024} KiB, the limit of this route; is it meant for it?"
    return await _limited_body(request, MOST_OF_ORDERS, text)


async def _limited_body(request: Request, most: int, refusal: str) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise Refusal(413, refusal)
        chunks.append(chunk)
    return b"".join(chunks)


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises Refusal 422."""
    try:
        value = json.loads(body) if body.strip() else None
    except (ValueError, RecursionError) as error:
        raise invalid(("body",), f"the body is not JSON: {error}", "json_invalid") from error
    if not isinstance(value, dict):
        raise invalid(("body",), "the body must be a JSON object", "model_attributes_type")
    return value


async def off_the_loop(parts: Parts, size: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work` in a thread when a body of `size` bytes makes it slow; few at a time, to bound memory."""
    if size <= SMALL_BODY:
        return work(*arguments)
    async with parts.parsing:
        return await asyncio.to_thread(work, *arguments)


async def answered_before(request: Request, project: str, body: bytes) -> dict[str, Any] | None:
    """The first answer to a repeated request; for checks that a repetition must not meet again."""
    key, digest = repeat_key(request, body)
    if key is None:
        return None
    return await parts_of(request).database.read(lambda c: repeats.first_answer(c, project, key, digest))


def repeat_key(request: Request, body: bytes) -> tuple[str | None, bytes]:
    """The request's Idempotency-Key, and what tells this request from another one with the same key. Raises Refusal 400."""
    key = request.headers.get("idempotency-key") or None
    if key is not None and len(key) > LONGEST_REPEAT_KEY:
        raise Refusal(400, f"Idempotency-Key has {len(key)} characters, at most {LONGEST_REPEAT_KEY} are allowed")
    return key, hashlib.sha256(f"{request.method} {request.url.path}\n".encode() + body).digest() if key else b""


async def write_once(
    request: Request, project: str, body: bytes, effect: Callable[[Connection], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Run `effect` in the store under the request's Idempotency-Key, if it has one: answer, and whether it ran now."""
    key, digest = repeat_key(request, body)
    return await parts_of(request).database.write(lambda c: repeats.once(c, project, key, digest, effect))
