"""A request in the engine: its choices are submitted together, collected or streamed, and cancelled together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from upweight.inference.constraints import GrammarError
from upweight.inference.engine import Engine
from upweight.inference.types import FinishReason, GenerationOutput, TextPiece
from upweight.server.worker.asked import Asked

Item = tuple[int, TextPiece | GenerationOutput]


class Running:
    """All choices of one request. `cancel` when nobody waits any more: it frees their rows within a step."""

    def __init__(self, engine: Engine, asked: Asked, *, pieces: bool) -> None:
        """Submits; raises what `Engine.submit` raises, and then nothing stays queued. `pieces`: text as it comes."""
        self.asked = asked
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._began = time.monotonic()
        self._ids: list[int] = []
        self._done = 0
        try:
            for index, params in enumerate(asked.params):
                put = self._put(index)
                prompt, on_text = asked.prompt_of(index), put if pieces else None
                self._ids.append(engine.submit(prompt, params, put, on_text=on_text, timeout=asked.timeout))
        except BaseException:  # whatever ends it, choices that were submitted do not run on for nobody
            self.cancel()
            raise

    async def outputs(self) -> list[GenerationOutput]:
        """Of all choices, in order."""
        found: dict[int, GenerationOutput] = {}
        async for index, item in self.items():
            if isinstance(item, GenerationOutput):
                found[index] = item
        return [found[index] for index in range(len(self._ids))]

    async def items(self) -> AsyncIterator[Item]:
        """Text pieces and outputs as they come, each with the index of its choice; ends after the last output."""
        while self._done < len(self._ids):
            index, item = await self._queue.get()
            self._done += isinstance(item, GenerationOutput)
            yield index, item

    def cancel(self) -> None:
        """Does nothing once all choices are answered."""
        for request_id in self._ids if self._done < len(self._ids) else ():
            self._engine.cancel(request_id)

    def failure(self, output: GenerationOutput) -> tuple[int, str] | None:
        """(HTTP status, message) of an output that is no answer."""
        limit = self.asked.timeout
        if output.finish_reason is FinishReason.REJECTED:
            return 400, f"messages or prompt is too long: {output.error}"
        if output.finish_reason is FinishReason.ABORTED:
            if limit is not None and time.monotonic() - self._began >= limit:
                return 504, f"the request took longer than its time limit of {limit:g} s and was aborted"
            return 503, f"the request was aborted: {output.error}"
        if output.finish_reason is FinishReason.ERROR and (output.error or "").startswith(GrammarError.__name__):
            return 400, f"response_format or tools cannot be followed: {output.error}"
        if output.finish_reason is FinishReason.ERROR:
            return 500, f"the request failed: {output.error}"
        return None

    def _put(self, index: int) -> Callable[[Any], None]:
        def hand_over(item: Any) -> None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))

        return hand_over
