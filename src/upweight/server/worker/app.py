"""The worker's routes (see `worker_protocol`). Nothing here blocks the event loop: training and saving run on threads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from upweight.errors import EngineError, RequestError, UpweightError
from upweight.inference.engine import EngineBusy
from upweight.inference.types import GenerationOutput
from upweight.server.ascii_json import AsciiJSON
from upweight.server.worker.core import OutOfOrder, WorkerCore
from upweight.server.worker.openai_answers import answer, failure
from upweight.server.worker.openai_requests import Asked, parse_chat, parse_text
from upweight.server.worker.openai_stream import stream_events
from upweight.server.worker_protocol import decode_batch

log = logging.getLogger(__name__)

CHAT, TEXT = "chat.completion", "text_completion"


def make_app(core: WorkerCore) -> Starlette:
    handlers = Handlers(core)
    return Starlette(
        routes=[
            Route("/state", handlers.state),
            Route("/train", handlers.train, methods=["POST"]),
            Route("/checkpoint", handlers.checkpoint, methods=["POST"]),
            Route("/export", handlers.export, methods=["POST"]),
            Route("/render", handlers.render, methods=["POST"]),
            Route("/openai/v1/models", handlers.models),
            Route("/openai/v1/chat/completions", handlers.chat, methods=["POST"]),
            Route("/openai/v1/completions", handlers.text, methods=["POST"]),
        ],
        exception_handlers={Exception: _unexpected, UpweightError: _refused, ClientDisconnect: _gone},
    )


class Handlers:
    def __init__(self, core: WorkerCore) -> None:
        self.core = core

    async def state(self, request: Request) -> Response:
        return _json(self.core.state().model_dump())

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
        tokenizer = self.core.model.tokenizer
        prompt_follows = body.get("add_generation_prompt") is not False
        text = tokenizer.render(messages, tools=body.get("tools"), add_generation_prompt=prompt_follows)
        return _json({"token_ids": tokenizer.encode(text), "text": text})

    async def models(self, request: Request) -> Response:
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "upweight"} for name in self.core.spec.model_names
        ]
        return _json({"object": "list", "data": data})

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, CHAT)

    async def text(self, request: Request) -> Response:
        return await self._complete(request, TEXT)

    async def _complete(self, request: Request, kind: str) -> Response:
        await self._ready()
        body = await _json_body(request)
        model = self._model_name(body.get("model"))
        default = ((self.core.spec.reinforcement or {}).get("sampling") or {}).get("max_tokens") or 256
        parse = parse_chat if kind == CHAT else parse_text
        asked = parse(body, self.core.model.tokenizer, default)
        self._check(asked)
        if asked.stream:
            events = stream_events(self.core.engine, kind, model, asked)
            return StreamingResponse(events, media_type="text/event-stream")
        outputs = await _unless_gone(request, self._generate(asked))
        if outputs is None:
            return Response(status_code=499)
        for output in outputs:
            if problem := failure(output):
                return _error(*problem, None)
        return _json(answer(kind, model, asked, outputs))

    def _check(self, asked: Asked) -> None:
        """Refuses before anything is queued, and before a stream has begun, which could not tell a status any more."""
        engine, choices = self.core.engine, len(asked.prompts) * len(asked.params)
        if choices > engine.max_queue:
            message = f"{len(asked.prompts)} prompts answered {len(asked.params)} times are {choices} choices; at most {engine.max_queue} fit in a request"
            raise RequestError(message, field="prompt")
        for prompt in asked.prompts:
            engine.check(prompt, asked.params[0])

    async def _generate(self, asked: Asked) -> list[GenerationOutput]:
        """All choices of all prompts; leaving early (cancelled) frees their rows."""
        loop = asyncio.get_running_loop()
        engine = self.core.engine
        futures: list[asyncio.Future[GenerationOutput]] = []
        ids: list[int] = []

        def resolve(future: asyncio.Future[GenerationOutput]) -> Callable[[GenerationOutput], None]:
            def put(output: GenerationOutput) -> None:
                if not future.done():
                    future.set_result(output)

            def hand_over(output: GenerationOutput) -> None:
                loop.call_soon_threadsafe(put, output)

            return hand_over

        try:
            for prompt in asked.prompts:
                for params in asked.params:
                    future: asyncio.Future[GenerationOutput] = loop.create_future()
                    ids.append(engine.submit(prompt, params, resolve(future)))
                    futures.append(future)
            return list(await asyncio.gather(*futures))
        except BaseException:
            for request_id in ids:
                engine.cancel(request_id)
            raise

    def _model_name(self, wanted: Any) -> str:
        names = self.core.spec.model_names
        if wanted is None:
            return names[0]
        if wanted not in names:
            raise ModelUnknown(f"model {wanted!r} is not served here; served: {', '.join(names)}", field="model")
        return str(wanted)

    async def _ready(self) -> None:
        await asyncio.to_thread(self.core.wait_ready)


class ModelUnknown(RequestError):
    """The request names another model."""


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
    return body


def _json(content: Any) -> Response:
    return AsciiJSON(content)


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, ModelUnknown):
        return _error(404, str(error), error.field)
    if isinstance(error, RequestError):
        return _error(400, str(error), error.field)
    if isinstance(error, OutOfOrder):
        return _error(409, str(error), None)
    if isinstance(error, EngineBusy):
        return _error(429, str(error), None, {"retry-after": "1"})
    return _error(503 if isinstance(error, EngineError) else 500, str(error), None)


def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


def _unexpected(request: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error)
    return _error(500, f"{type(error).__name__}: {error}", None)


def _error(status: int, message: str, field: str | None, headers: dict[str, str] | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"detail": message, "error": {"message": message, "type": kind, "param": field, "code": None}}
    return AsciiJSON(body, status, headers)
