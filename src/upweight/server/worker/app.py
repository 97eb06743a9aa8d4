"""The worker's routes (see `worker_protocol`). Nothing here blocks the event loop: training, saving and parsing run on threads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from upweight.errors import EngineError, RequestError, UpweightError
from upweight.inference.constraints import Grammars
from upweight.inference.engine import EngineBusy
from upweight.inference.types import GenerationOutput
from upweight.server.ascii_json import AsciiJSON
from upweight.server.error_bodies import anthropic_error_body, error_body, is_anthropic
from upweight.server.worker.anthropic_answers import Message, message_events
from upweight.server.worker.anthropic_requests import count_tokens, parse_messages
from upweight.server.worker.asked import Asked, Serving, longest_text
from upweight.server.worker.core import OutOfOrder, WorkerCore
from upweight.server.worker.fields import is_deeper
from upweight.server.worker.openai_answers import CHAT, TEXT, OpenAIAnswers
from upweight.server.worker.openai_requests import parse_chat, parse_text
from upweight.server.worker.openai_stream import stream_events
from upweight.server.worker.running import Running
from upweight.server.worker_protocol import decode_batch

log = logging.getLogger(__name__)

DEFAULT_TOKENS = 256
DEEPEST = 100  # levels of nesting in a body; templates and grammars walk it by recursion
Parse = Callable[[Mapping[str, Any], Serving], Asked]
Events = Callable[[Running], AsyncIterator[bytes]]
Whole = Callable[[list[GenerationOutput]], dict[str, Any]]


def make_app(core: WorkerCore) -> Starlette:
    handlers = Handlers(core)
    openai = "/openai/v1"
    return Starlette(
        routes=[
            Route("/state", handlers.state),
            Route("/health", handlers.health),
            Route("/stats", handlers.stats),
            Route("/train", handlers.train, methods=["POST"]),
            Route("/checkpoint", handlers.checkpoint, methods=["POST"]),
            Route("/export", handlers.export, methods=["POST"]),
            Route("/render", handlers.render, methods=["POST"]),
            Route(f"{openai}/models", handlers.models),
            Route(f"{openai}/models/{{name:path}}", handlers.model),
            Route(f"{openai}/chat/completions", handlers.chat, methods=["POST"]),
            Route(f"{openai}/completions", handlers.text, methods=["POST"]),
            Route(f"{openai}/messages", handlers.messages, methods=["POST"]),
            Route(f"{openai}/messages/count_tokens", handlers.count_tokens, methods=["POST"]),
        ],
        exception_handlers={Exception: _unexpected, UpweightError: _refused, ClientDisconnect: _gone},
    )


class Handlers:
    def __init__(self, core: WorkerCore) -> None:
        self.core = core

    async def state(self, request: Request) -> Response:
        return _json(self.core.state().model_dump())

    async def health(self, request: Request) -> Response:
        """503 before the model is loaded and once the engine has ended."""
        well = self.core.loaded and self.core.engine.alive
        return AsciiJSON({"status": "ok" if well else "unavailable"}, 200 if well else 503)

    async def train(self, request: Request) -> Response:
        index = int(request.query_params["batch_index"])
        body = await request.body()
        result = await asyncio.to_thread(lambda: self.core.train(index, decode_batch(body)))
        return _json(result.model_dump())

    async def checkpoint(self, request: Request) -> Response:
        return _json((await asyncio.to_thread(self.core.checkpoint)).model_dump())

    async def export(self, request: Request) -> Response:
        folder = (await request.json())["path"]
        return _json({"path": await asyncio.to_thread(self.core.export, folder)})

    async def render(self, request: Request) -> Response:
        await self._ready()
        body = await _json_body(request)
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise RequestError("messages must be a list", field="messages")
        prompt_follows = body.get("add_generation_prompt") is not False
        render = self.serving.tokenizer.render
        text = await asyncio.to_thread(render, messages, tools=body.get("tools"), add_generation_prompt=prompt_follows)
        return _json({"token_ids": await asyncio.to_thread(self.serving.encode, text, "messages"), "text": text})

    async def stats(self, request: Request) -> Response:
        await self._ready()
        return _json(self.core.engine.stats())

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [_model(name) for name in self.core.spec.model_names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.core.spec.model_names:
            raise ModelUnknown(f"model {name[:200]!r} does not exist", field="model")
        return _json(_model(name))

    async def chat(self, request: Request) -> Response:
        return await self._openai(request, CHAT, parse_chat)

    async def text(self, request: Request) -> Response:
        return await self._openai(request, TEXT, parse_text)

    async def messages(self, request: Request) -> Response:
        model, asked = await self._asked(request, parse_messages)
        message = Message(model, asked, self.serving.tokenizer)
        return await self._answer(
            request, asked, lambda running: message_events(running, message), lambda outputs: message.whole(outputs[0])
        )

    async def count_tokens(self, request: Request) -> Response:
        await self._ready()
        body = await _json_body(request)
        self._model_name(body.get("model"))
        return _json({"input_tokens": await asyncio.to_thread(count_tokens, body, self.serving)})

    async def _openai(self, request: Request, kind: str, parse: Parse) -> Response:
        model, asked = await self._asked(request, parse)
        answers = OpenAIAnswers(kind, model, asked, self.serving.tokenizer)
        return await self._answer(request, asked, lambda running: stream_events(running, answers), answers.whole)

    async def _asked(self, request: Request, parse: Parse) -> tuple[str, Asked]:
        await self._ready()
        body = await _json_body(request)
        model = self._model_name(body.get("model"))
        asked = await asyncio.to_thread(parse, body, self.serving)
        most, choices = self.core.engine.max_queue, len(asked.params)
        if choices > most:
            message = f"{len(asked.prompts)} prompts answered {asked.n} times are {choices} choices; at most {most} fit in a request"
            raise RequestError(message, field="prompt")
        return model, asked

    async def _answer(self, request: Request, asked: Asked, events: Events, whole: Whole) -> Response:
        running = Running(self.core.engine, asked, pieces=asked.stream)
        if asked.stream:
            return _EventResponse(running, _guarded(request, events(running)))
        try:
            outputs = await _unless_gone(request, running.outputs())
        finally:
            running.cancel()
        if outputs is None:
            return Response(status_code=499)
        for output in outputs:
            if problem := running.failure(output):
                return _error(request, *problem)
        return _json(whole(outputs))

    @functools.cached_property
    def serving(self) -> Serving:
        """The model as it is read by requests; only once it is loaded."""
        core = self.core
        sampling = core.spec.settings.get("sampling") or {}
        tokenizer, vocab_size = core.model.tokenizer, core.model.config.vocab_size
        max_context = min(core.engine.max_context, core.engine.scheduler.capacity)
        return Serving(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_context=max_context,
            longest_text=longest_text(tokenizer, max_context),
            default_tokens=sampling.get("max_tokens") or DEFAULT_TOKENS,
            timeout=core.spec.request_timeout,
            grammars=Grammars(tokenizer, vocab_size),
        )

    def _model_name(self, wanted: Any) -> str:
        names = self.core.spec.model_names
        if wanted is None:
            return names[0]
        if wanted not in names:
            raise RequestError(
                f"model {str(wanted)[:200]!r} is not served here; served: {', '.join(names)}", field="model"
            )
        return str(wanted)

    async def _ready(self) -> None:
        if not self.core.loaded:
            await asyncio.to_thread(self.core.wait_ready)


class ModelUnknown(RequestError):
    """There is no model at the path that is read."""


async def _guarded(request: Request, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream that fails says so: its status was sent long before."""
    try:
        async for event in events:
            yield event
    except Exception as error:  # whatever it is, the client is told in the form of its route
        log.exception("stream failed")
        body = _error_body(request, 500, f"{type(error).__name__}: {error}", None)
        name = b"event: error\n" if is_anthropic(request.url.path) else b""
        yield name + b"data: " + json.dumps(body).encode() + b"\n\n"


class _EventResponse(StreamingResponse):
    """Server-sent events of a running request, which ends with the response, however that ends."""

    def __init__(self, running: Running, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


async def _unless_gone(request: Request, work: Awaitable[list[GenerationOutput]]) -> list[GenerationOutput] | None:
    """The outputs, or None when the client went away first (the work is cancelled then)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _json_body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", field="body") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", field="body")
    if is_deeper(body, DEEPEST):
        raise RequestError(f"the body is nested deeper than {DEEPEST} levels", field="body")
    return body


def _json(content: Any) -> Response:
    return AsciiJSON(content)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "upweight"}


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, ModelUnknown):
        return _error(request, 404, str(error), error.field)
    if isinstance(error, RequestError):
        return _error(request, 400, str(error), error.field)
    if isinstance(error, OutOfOrder):
        return _error(request, 409, str(error))
    if isinstance(error, EngineBusy):
        return _error(request, 429, str(error), headers={"retry-after": "1"})
    return _error(request, 503 if isinstance(error, EngineError) else 500, str(error))


def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


def _unexpected(request: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error)
    return _error(request, 500, f"{type(error).__name__}: {error}")


def _error(
    request: Request, status: int, message: str, field: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    return AsciiJSON(_error_body(request, status, message, field), status, headers)


def _error_body(request: Request, status: int, message: str, field: str | None) -> dict[str, Any]:
    if is_anthropic(request.url.path):
        return anthropic_error_body(status, message)
    return error_body(status, message, field)
