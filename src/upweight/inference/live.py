"""One accepted request on its way: the row it computes with, the text it grows and the answer it ends with.

Invariant: `answer` calls `on_done` exactly once, whoever ends the request first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from upweight.inference.answer import AnswerText
from upweight.inference.metrics import EngineMetrics, RequestTimes
from upweight.inference.scheduler import Row
from upweight.inference.types import FinishReason, GenerationOutput, Request, TextPiece

log = logging.getLogger(__name__)


@dataclass
class Live:
    """Used by one thread at a time: the engine's, or its watchdog's while the engine's waits for a step."""

    request: Request
    row: Row
    text: AnswerText
    output: GenerationOutput
    times: RequestTimes
    told: int = 0  # tokens that were given out with pieces of text
    answered: bool = False

    def push(self, token: int) -> FinishReason | None:
        """The next token was drawn; why the answer ends with it, or None. Gives out what text became final."""
        if self.row.constraint is not None:
            self.row.constraint.accept(token)
        reason = self._finish_reason(token)
        if reason is None:
            self._give_text()
        return reason

    def answer(self, reason: FinishReason, metrics: EngineMetrics) -> None:
        """Gives out the rest of the text and the whole output. Does nothing the second time."""
        if self.answered:
            return
        self.answered = True
        try:
            self.text.flush()
            self._give_text(last=True)
        except Exception as error:  # the request's own parts; it is answered all the same
            log.exception("text of request %d", self.request.id)
            self.output.error, reason = f"{type(error).__name__}: {error}", FinishReason.ERROR
        output = replace(self.output, finish_reason=reason, text=self.text.text)
        output.cached_tokens, output.cached_version = self.row.cached_tokens, self.row.cached_version
        metrics.done(self.request.id, output, self.times)
        guarded(self.request.on_done, output)

    def _finish_reason(self, token: int) -> FinishReason | None:
        if token in self.row.stop_ids:
            return FinishReason.STOP
        self.text.push(token)
        if self.text.stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.row.tokens) >= self.row.limit else None

    def _give_text(self, *, last: bool = False) -> None:
        if self.request.on_text is None:
            return
        text, end = self.text.fresh(last=last)
        if text:
            told, self.told = self.told, end
            output = self.output
            piece = TextPiece(text=text, prompt_logprobs=output.prompt_logprobs, **output.lists(told, end))
            guarded(self.request.on_text, piece)


def guarded(callback: Callable[[Any], None], value: Any) -> None:
    """A caller's callback must not take the loop down."""
    try:
        callback(value)
    except Exception:  # the caller's code
        log.exception("callback of a request failed")
