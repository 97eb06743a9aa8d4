"""Many requests, one wait: what a synchronous caller of the engine does.

Invariants
- As many requests as the engine's queue takes are in it; the others follow as answers come.
- Leaving early, by whatever exception, cancels what is still running.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Sequence

from upweight.errors import EngineError
from upweight.inference.engine import Engine, EngineBusy
from upweight.inference.types import GenerationOutput, OnDone, SamplingParams

_RETRY_S = 0.02  # while the queue is full of other callers' requests
_ALIVE_CHECK_S = 1.0


def answers_to(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[GenerationOutput]:
    """The outputs of all prompts, in order. `RequestError` before anything runs when one of them is invalid."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    pairs = list(zip(prompts, each, strict=True))
    for prompt, one in pairs:
        with contextlib.suppress(EngineBusy):  # valid; its turn comes
            engine.check(prompt, one)
    gathered = _Gathered(engine)
    try:
        for prompt, one in pairs:
            gathered.submit(prompt, one)
        while gathered.running:
            gathered.take()
    finally:
        for request_id in gathered.running.values():
            engine.cancel(request_id)
    return [gathered.outputs[index] for index in range(len(pairs))]


class _Gathered:
    """Requests of one caller; only the callbacks run in the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._done: queue.SimpleQueue[tuple[int, GenerationOutput]] = queue.SimpleQueue()
        self.running: dict[int, int] = {}  # index → request id
        self.outputs: dict[int, GenerationOutput] = {}

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> None:
        index = len(self.running) + len(self.outputs)
        while True:
            try:
                self.running[index] = self._engine.submit(prompt, params, self._keeper(index))
                return
            except EngineBusy:
                if self.running:
                    self.take()
                else:
                    time.sleep(_RETRY_S)

    def take(self) -> None:
        """Waits for one answer."""
        while True:
            try:
                index, output = self._done.get(timeout=_ALIVE_CHECK_S)
            except queue.Empty:
                if not self._engine.alive:
                    raise EngineError("the engine ended without an answer to this request") from None
            else:
                self.outputs[index] = output
                del self.running[index]
                return

    def _keeper(self, index: int) -> OnDone:
        return lambda output: self._done.put((index, output))
