"""The engine: one loop that everybody's requests go through.

    take orders → plan → prefill → decode → hand out tokens          (`Engine._step`)

Invariants:
* Every accepted request is answered exactly once through its `on_done`, whatever happens to it or to the engine.
* Weights change only between two steps; each token carries the version that drew it.
* A request that fails, fails alone; an exception in a step fails the rows of that step and the loop goes on with an empty store.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from upweight.errors import EngineError, RequestError
from upweight.inference.answer import AnswerText
from upweight.inference.runner import Drawn, ModelRunner, page_bytes
from upweight.inference.scheduler import Row, Scheduler
from upweight.inference.types import FinishReason, GenerationOutput, OnDone, OnText, Request, SamplingParams
from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.tokenizer import Tokenizer
from upweight.weights.fingerprint import fingerprint

log = logging.getLogger(__name__)

STORE_BYTES = 768 << 20
MAX_FAILURES = 3
LEAST_TEMPERATURE = 1e-3


class EngineBusy(EngineError):
    """The queue is full; try again later."""


@dataclass
class _Live:
    """A request with the row and text it has grown so far."""

    request: Request
    row: Row
    answer: AnswerText
    output: GenerationOutput


class Engine:
    """Continuous batching over one set of weights. `submit`, `cancel`, `set_weights` may be called from any thread."""

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        tokenizer: Tokenizer,
        *,
        max_rows: int = 32,
        max_context: int | None = None,
        max_queue: int = 4096,
        store_bytes: int = STORE_BYTES,
        version: int = 0,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_context = min(max_context or config.max_context, config.max_context)
        self.max_queue = max_queue
        pages = 1 + max(64, min(store_bytes // page_bytes(config), max_rows * self.max_context))
        self.scheduler = Scheduler(max_rows=max_rows, num_pages=pages)
        self.scheduler.set_version(version)
        self._make_runner: Callable[[Params], ModelRunner] = lambda weights: ModelRunner(
            config, weights, num_pages=pages, max_rows=max_rows
        )
        self.runner = self._make_runner(params)
        self._ids = itertools.count(1)
        self._live: dict[int, _Live] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._dead: str | None = None
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._counts = {"requests": 0, "finished": 0, "tokens": 0, "steps": 0, "prompt_tokens": 0, "cached_tokens": 0}

    # ---- from any thread -------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Aborts what is running and ends the loop."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def version(self) -> int:
        return self.scheduler.version

    @property
    def alive(self) -> bool:
        return self._dead is None and not self._stopping

    def wait_for_end(self) -> str | None:
        """Blocks until the loop has ended: why, if by itself after failures; None if it was stopped."""
        if self._thread is not None:
            self._thread.join()
        return self._dead

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_done: OnDone,
        *,
        on_text: OnText | None = None,
        timeout: float | None = None,
    ) -> int:
        """Queues one completion and returns its id. `RequestError` names the field that is wrong, `EngineBusy` means later."""
        self.check(prompt_ids, params)
        request = Request(
            id=next(self._ids),
            prompt_ids=tuple(prompt_ids),
            params=params,
            on_done=on_done,
            on_text=on_text,
            deadline=None if timeout is None else time.monotonic() + timeout,
        )
        self._order(lambda: self._accept(request))
        return request.id

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises what `submit` would raise now."""
        self._check(prompt_ids, params)
        if not self.alive:
            raise EngineError(self._dead or "the engine is stopped")
        if len(self._live) + len(self._orders) >= self.max_queue:
            raise EngineBusy(f"{self.max_queue} requests are waiting already")

    def cancel(self, request_id: int) -> None:
        """Aborts a request before the next step; unknown and finished ones are ignored."""
        self._order(lambda: self._abort(request_id, "cancelled"))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[GenerationOutput]:
        """Completions of all prompts, in order; waits for them."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        outputs: list[GenerationOutput | None] = [None] * len(prompts)
        left = threading.Semaphore(0)

        def done(index: int) -> OnDone:
            def store(output: GenerationOutput) -> None:
                outputs[index] = output
                left.release()

            return store

        for prompt, one in zip(prompts, each, strict=True):
            self._check(prompt, one)
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            self.submit(prompt, one, done(index))
        for _ in prompts:
            left.acquire()
        return [output for output in outputs if output is not None]

    def set_weights(self, params: Params, version: int) -> str:
        """Swaps between two steps; returns the fingerprint of the arrays that the compiled steps receive from now on."""
        done: deque[str | BaseException] = deque()
        finished = threading.Event()

        def swap() -> None:
            try:
                self.runner.params = params
                self.scheduler.set_version(version)
                done.append(fingerprint(self.runner.params))
            except BaseException as error:
                done.append(error)
                raise
            finally:
                finished.set()

        self._order(swap)
        while not finished.wait(1.0):
            if not self.alive:
                raise EngineError(self._dead or "the engine is stopped")
        result = done.pop()
        if isinstance(result, BaseException):
            raise EngineError(f"weights could not be swapped: {result}") from result
        return result

    def fingerprint(self) -> str:
        """Of the arrays that the compiled decode receives."""
        return fingerprint(self.runner.params)

    def stats(self) -> dict[str, float]:
        return {
            **self._counts,
            "active": len(self.scheduler.running),
            "waiting": len(self._live) - len(self.scheduler.running),
            "preemptions": self.scheduler.preemptions,
            "prefilled_tokens": self.scheduler.prefilled_tokens,
            "programs": self.runner.num_programs,
        }

    # ---- in the loop's thread --------------------------------------------------------------------------------------

    def _order(self, order: Callable[[], None]) -> None:
        with self._wake:
            self._orders.append(order)
            self._wake.notify_all()

    def _loop(self) -> None:
        while not self._stopping:
            try:
                if not self._step():
                    with self._wake:
                        if not self._orders and not self._stopping:
                            self._wake.wait(self._nap())
            except Exception as error:  # noqa: BLE001 - whatever a step raises, the loop must live
                self._recover(error)
                if self._dead is not None:
                    break
        reason = self._dead or "the engine was stopped"
        while self._orders:
            self._orders.popleft()()
        for request_id in list(self._live):
            self._abort(request_id, reason)

    def _step(self) -> bool:
        """One step; False when there was nothing to do."""
        while self._orders:
            self._orders.popleft()()
        self._abort_late()
        plan = self.scheduler.plan()
        if plan.empty:
            return False
        self.runner.prefill(plan.prefill)
        if plan.decode:
            self._hand_out(plan.decode, self.runner.decode(plan.decode))
        self._failures = 0
        self._counts["steps"] += 1
        return True

    def _nap(self) -> float | None:
        """How long an idle loop may sleep: until an order comes, or the next deadline."""
        deadlines = [live.request.deadline for live in self._live.values() if live.request.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self, request: Request) -> None:
        seed = secrets.randbits(64) if request.params.seed is None else request.params.seed & (2**64 - 1)
        prompt_len = len(request.prompt_ids)
        room = min(self.max_context, self.scheduler.capacity)
        wanted = room if request.params.max_tokens is None else prompt_len + request.params.max_tokens
        eos = frozenset() if request.params.ignore_eos else frozenset(self.tokenizer.eos_ids)
        row = Row(
            request=request,
            tokens=list(request.prompt_ids),
            limit=min(wanted, room),
            seed=seed,
            stop_ids=request.params.stop_ids | eos,
        )
        answer = AnswerText(self.tokenizer, request.params.stop)
        live = _Live(request, row, answer, GenerationOutput(prompt_len=prompt_len, seed=seed))
        self._live[request.id] = live
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += prompt_len
        if prompt_len >= room:
            live.output.error = f"the prompt has {prompt_len} tokens, {room - 1} fit"
            self._close(live, FinishReason.REJECTED)
        elif request.params.max_tokens == 0:
            self._close(live, FinishReason.LENGTH)
        else:
            self.scheduler.add(row)

    def _hand_out(self, rows: Sequence[Row], drawn: Drawn) -> None:
        for row, token, logprob, raw in zip(rows, *drawn, strict=True):
            live = self._live[row.request.id]
            self.scheduler.advance(row, token)
            output = live.output
            output.token_ids.append(token)
            output.logprobs.append(logprob)
            output.raw_logprobs.append(raw)
            output.token_versions.append(self.scheduler.version)
            self._counts["tokens"] += 1
            reason = self._finish_reason(live, token)
            if reason is None:
                self._give_text(live)
            else:
                self._end(live, reason)

    def _finish_reason(self, live: _Live, token: int) -> FinishReason | None:
        if token in live.row.stop_ids:
            return FinishReason.STOP
        live.answer.push(token)
        if live.answer.stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(live.row.tokens) >= live.row.limit else None

    def _give_text(self, live: _Live, *, last: bool = False) -> None:
        if live.request.on_text is None:
            return
        piece = live.answer.fresh(last=last)
        if piece:
            _guarded(live.request.on_text, piece)

    def _end(self, live: _Live, reason: FinishReason) -> None:
        """Takes a row that the scheduler holds out of it, and answers."""
        self.scheduler.finish(live.row)
        self._close(live, reason)

    def _close(self, live: _Live, reason: FinishReason) -> None:
        live.answer.flush()
        self._give_text(live, last=True)
        output = replace(live.output, finish_reason=reason, text=live.answer.text)
        output.cached_tokens = live.row.cached_tokens
        self._counts["finished"] += 1
        self._counts["cached_tokens"] += output.cached_tokens
        del self._live[live.request.id]
        _guarded(live.request.on_done, output)

    def _abort(self, request_id: int, why: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            live.output.error = why
            self._end(live, FinishReason.ABORTED)

    def _abort_late(self) -> None:
        now = time.monotonic()
        late = [i for i, x in self._live.items() if x.request.deadline is not None and x.request.deadline <= now]
        for request_id in late:
            self._abort(request_id, "the time limit of the request has passed")

    def _recover(self, error: Exception) -> None:
        """The rows of a failed step may hold a store that was given away: they fail, and the store starts anew."""
        log.exception("engine step failed")
        self._failures += 1
        for live in list(self._live.values()):
            if live.row in self.scheduler.running:
                live.output.error = f"{type(error).__name__}: {error}"
                self._end(live, FinishReason.ERROR)
        self.scheduler.set_version(self.scheduler.version)
        self.runner = self._make_runner(self.runner.params)
        if self._failures >= MAX_FAILURES:
            self._dead = f"the engine failed {self._failures} times in a row, last: {error}"

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        if not len(prompt_ids):
            raise RequestError("the prompt is empty", field="prompt")
        vocab = self.config.vocab_size
        wrong = next((i for i in prompt_ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is outside the vocabulary of {vocab}", field="prompt")
        _in_range("temperature", params.temperature, 0, 100)
        if 0 < params.temperature < LEAST_TEMPERATURE:  # logits over it would leave the range of float32
            raise RequestError(
                f"temperature is {params.temperature}; it must be 0 (greedy) or at least {LEAST_TEMPERATURE}",
                field="temperature",
            )
        _in_range("top_p", params.top_p, 0, 1)
        _in_range("top_k", params.top_k, 0, None)
        if params.max_tokens is not None:
            _in_range("max_tokens", params.max_tokens, 0, None)
        _in_range("min_tokens", params.min_tokens, 0, None)
        _in_range("frequency_penalty", params.frequency_penalty, -100, 100)
        _in_range("rep_window", params.rep_window, 0, None)


def _in_range(field: str, value: float, low: float, high: float | None) -> None:
    if not value >= low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{field} is {value}; it must be {bound}", field=field)


def _guarded(callback: Callable[[Any], None], value: Any) -> None:
    """A caller's callback must not take the loop down."""
    try:
        callback(value)
    except Exception:
        log.exception("callback of a request failed")
