"""The engine: one loop that everybody's requests go through.

    take orders → plan → prefill → decode → hand out tokens          (`Engine._step`)

Invariants:
* Every accepted request is answered exactly once through its `on_done`, whatever happens to it or to the engine.
* Weights change only between two steps; each token carries the version that drew it.
* A request that fails, fails alone; an exception in a step fails the rows of that step and the loop goes on with an empty store.
* A step that does not come back in time fails every request there is, and new ones are refused until it does; one that never does
  ends the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from upweight.errors import ConfigError, EngineError
from upweight.inference.answer import AnswerText
from upweight.inference.checks import check_request, check_timeout, check_whole
from upweight.inference.live import Live, guarded
from upweight.inference.metrics import EngineMetrics, RequestTimes
from upweight.inference.programs import token_bytes
from upweight.inference.runner import CACHE_BYTES, Drawn, ModelRunner, Scored
from upweight.inference.scheduler import Row, Scheduler
from upweight.inference.swaps import CacheOnUpdate, OnUpdate, Swap, WeightSwaps, check_policies, fitted, transport
from upweight.inference.types import FinishReason, GenerationOutput, OnDone, OnText, Request, SamplingParams
from upweight.inference.warm_up import WarmUp, warm_up
from upweight.inference.watchdog import PATIENCE, Watchdog
from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.tokenizer import Tokenizer
from upweight.weights.fingerprint import fingerprint

log = logging.getLogger(__name__)

STORE_BYTES = 768 << 20
MAX_FAILURES = 3
STEP_TIMEOUT = 600.0
STOP_PATIENCE = 10.0
NOT_FINITE = EngineError("the model gave logits that are not finite")
_IDS = itertools.count(1)  # of all engines of this process: no two requests ever have the same


class EngineBusy(EngineError):
    """The queue is full; try again later."""


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
        cache_bytes: int = CACHE_BYTES,
        version: int = 0,
        on_update: OnUpdate = "continue",
        cache_on_update: CacheOnUpdate = "version",
        step_timeout: float = STEP_TIMEOUT,
    ) -> None:
        check_policies(on_update, cache_on_update)
        if not 0 < step_timeout < math.inf:
            raise ConfigError(f"step_timeout is {step_timeout}; it must be a positive number of seconds")
        check_whole("max_rows", max_rows, 1)
        check_whole("max_queue", max_queue, 1)
        check_whole("version", version, 0)
        if max_context is not None:
            check_whole("max_context", max_context, 1)
        self.config = config
        self.tokenizer = tokenizer
        self.max_context = min(max_context or config.max_context, config.max_context)
        self.max_queue = max_queue
        pages = 1 + max(64, min(store_bytes // token_bytes(config, params), max_rows * self.max_context))
        self.scheduler = Scheduler(max_rows=max_rows, num_pages=pages, keep_prefixes=cache_on_update == "keep")
        self.scheduler.set_version(version)
        self.runner = ModelRunner(config, params, num_pages=pages, max_rows=max_rows, cache_bytes=cache_bytes)
        self.metrics = EngineMetrics()
        self._live: dict[int, Live] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self.on_update: OnUpdate = on_update
        self._swaps = WeightSwaps(self.scheduler, on_update, self._install, self._abort_running)
        self._wake = threading.Condition()
        self._stopping = False
        self._dead: str | None = None
        self._ended = threading.Event()
        self._watchdog = Watchdog(step_timeout, on_late=self._step_is_late, on_lost=self._step_is_lost)
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._transport = transport(params, params)

    # ---- from any thread -------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
            self._thread.start()
            self._watchdog.start()
        return self

    def warm_up(self, context: int = 512, *, prompt_logprobs: bool = False) -> WarmUp:
        """Compiles what requests with prompts and answers of up to `context` tokens need, so that none of them waits for it later.

        Before `start` only. Without it each shape is compiled in the step that meets it first, and all rows wait meanwhile.
        """
        check_whole("context", context, 1)
        if self._thread is not None or self._closed:
            raise EngineError("warm_up comes before start")
        return warm_up(self.runner, min(context, self.max_context), prompt_logprobs=prompt_logprobs)

    def stop(self) -> None:
        """Aborts what is running and ends the loop; a step that is under way is waited for, but not for long."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is None:
            self._close_down("the engine was stopped")
        elif self._thread is not threading.current_thread() and not self._ended.wait(STOP_PATIENCE):
            self._watchdog.give_up()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def version(self) -> int:
        return self.scheduler.version

    @property
    def _waiting(self) -> int:
        return max(0, len(self._live) - len(self.scheduler.running)) + len(self._orders)

    @property
    def alive(self) -> bool:
        """Whether requests are taken now."""
        return self._dead is None and not self._stopping and not self._watchdog.late

    def wait_for_end(self) -> str | None:
        """Blocks until the loop has ended: why, if by itself after failures; None if it was stopped."""
        if self._thread is not None:
            self._ended.wait()
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
        check_timeout(timeout)
        self.check(prompt_ids, params)
        request = Request(
            id=next(_IDS),
            prompt_ids=tuple(prompt_ids),
            params=params,
            on_done=on_done,
            on_text=on_text,
            deadline=None if timeout is None else time.monotonic() + timeout,
        )
        times = RequestTimes(submitted=time.monotonic())
        self._order(lambda: self._accept(request, times))
        return request.id

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises what `submit` would raise now."""
        check_request(prompt_ids, params, self.config.vocab_size)
        if not self.alive:
            late = "a step of the engine does not come back; try again later" if self._watchdog.late else None
            raise EngineError(self._dead or late or "the engine is stopped")
        if self._waiting >= self.max_queue:
            raise EngineBusy(f"{self.max_queue} requests are waiting already")

    def cancel(self, request_id: int) -> None:
        """Aborts a request before the next step; unknown and finished ones are ignored."""
        with contextlib.suppress(EngineError):  # an engine that has ended has answered everything
            self._order(lambda: self._abort(request_id, "cancelled"))

    def set_weights(self, params: Params, version: int) -> str:
        """Swaps between two steps; returns the fingerprint of the arrays that the compiled steps receive from now on.

        Waits for rows to finish if `on_update` is "drain". `EngineError` when the arrays do not fit the decoder, naming the
        first that does not, or cannot be read; the weights then stay as they were.
        """
        check_whole("version", version, 0)
        swap = Swap(fitted(params, self.runner.params), version)
        made = _read(swap.params)  # here, so that no decode step waits for it; the loop only puts these arrays in place
        self._order(lambda: self._swaps.add(swap))
        swap.done.wait()
        if swap.error is not None:
            raise EngineError(f"weights could not be swapped: {swap.error}") from swap.error
        self._transport = transport(params, swap.params)
        return made

    def fingerprint(self) -> str:
        """Of the arrays that the compiled decode receives."""
        return fingerprint(self.runner.params)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, averages over the last requests, and what runs and waits now."""
        running = len(self.scheduler.running)
        return {
            **self.metrics.summary(),
            "active_tasks": running,
            "waiting_queue": self._waiting,
            "preemptions": self.scheduler.preemptions,
            "prefilled_tokens": self.scheduler.prefilled_tokens,
            "programs": self.runner.num_programs,
            "weights_version": self.version,
            "weights_transport": self._transport,
        }

    # ---- in the loop's thread --------------------------------------------------------------------------------------

    def _order(self, order: Callable[[], None]) -> None:
        """Hands work to the loop; `EngineError` once nobody would do it."""
        with self._wake:
            if self._closed:
                raise EngineError(self._dead or "the engine is stopped")
            self._orders.append(order)
            self._wake.notify_all()

    def _loop(self) -> None:
        try:
            while not self._stopping and self._dead is None:
                self._turn()
        except BaseException as error:  # whatever ends the loop, those who wait are told why
            self._dead = f"the engine could not recover: {type(error).__name__}: {error}"
            log.exception("the engine's loop ended")
        finally:
            self._watchdog.stop()
            self._close_down(self._dead or "the engine was stopped")
            self._ended.set()

    def _turn(self) -> None:
        """One step, or a nap when there is nothing to do."""
        try:
            if not self._step():
                with self._wake:
                    if not self._orders and not self._stopping:
                        self._wake.wait(self._nap())
        except Exception as error:  # noqa: BLE001 - whatever a step raises, the loop must live
            self._recover(error)

    def _close_down(self, why: str) -> None:
        """Nothing is taken any more; whatever was taken is answered."""
        with self._wake:
            self._closed = True
        self._take_orders()
        self._swaps.refuse(why)
        for request_id, live in list(self._live.items()):
            try:
                self._abort(request_id, why)
            except Exception:  # whatever state a failed step left behind, the request is answered
                log.exception("request %d", request_id)
                self._live.pop(request_id, None)
                live.answer(FinishReason.ABORTED, self.metrics)

    def _step_is_late(self) -> None:
        """The loop's thread waits for a step that may never end; nobody else shall."""
        log.error("a step takes longer than %g s; %d requests fail", self._watchdog.limit, len(self._live))
        for live in self._live.values():
            live.output.error = f"EngineError: a step of the engine took longer than {self._watchdog.limit:g} s"
            live.answer(FinishReason.ERROR, self.metrics)

    def _step_is_lost(self) -> None:
        """It may come back all the same; then the loop ends."""
        if not self._stopping:
            self._dead = f"a step of the engine did not come back within {PATIENCE * self._watchdog.limit:g} s"
        self._close_down(self._dead or "the engine was stopped")
        self._ended.set()

    def _take_orders(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _step(self) -> bool:
        """One step; False when there was nothing to do."""
        began = time.perf_counter()
        self._take_orders()
        self._abort_late()
        swapped = self._swaps.perform()
        plan = self.scheduler.plan()
        if plan.empty:
            return swapped
        with self._watchdog.step():
            scored = self.runner.prefill(plan.prefill)
        self._take_scores(scored)
        left = [
            row for row in plan.decode if row.request.id in self._live
        ]  # scores that are no numbers have failed theirs
        rows = self._constrained(left)
        if rows:
            waited = any(row.num_output for row in rows)
            with self._watchdog.step():
                drawn = self.runner.decode(rows, plan.beside)
            self._hand_out(rows, drawn)
            if waited:
                prefills = bool(plan.prefill or plan.beside)
                step = self.runner.places(len(rows)), prefills, time.perf_counter() - began
                self.metrics.decode_steps.append(step)
        elif plan.beside is not None:
            with self._watchdog.step():
                self.runner.prefill([plan.beside])
        self._failures = 0
        self.metrics.steps += 1
        return True

    def _install(self, params: Params, version: int) -> None:
        self.runner.params = params
        self.scheduler.set_version(version)

    def _abort_running(self, why: str) -> None:
        """Rows that have begun, those that were preempted included."""
        for live in list(self._live.values()):
            if live.row in self.scheduler.running or live.row.restarts:
                self._abort(live.request.id, why)

    def _take_scores(self, scored: Sequence[Scored]) -> None:
        """Log-probs of prompt tokens reach their outputs; rows that wanted nothing else end."""
        for row, start, logprobs in scored:
            known = self._live[row.request.id].output.prompt_logprobs
            if known is None or row.num_output:  # a row that goes on after a preemption has its scores
                continue
            for position, logprob in enumerate(logprobs, start + 1):
                if position < len(known):
                    known[position] = logprob
        for row in {id(score.row): score.row for score in scored}.values():  # a long prompt comes in several pieces
            live = self._live[row.request.id]
            if any(score is not None and math.isnan(score) for score in live.output.prompt_logprobs or ()):
                self._fail(row, NOT_FINITE)
            elif row.only_scored and not row.missing:
                self._end(live, FinishReason.LENGTH)

    def _constrained(self, rows: Sequence[Row]) -> list[Row]:
        """Sets the masks of rows under a constraint; a constraint that fails takes its row alone."""
        kept: list[Row] = []
        for row in rows:
            if row.constraint is not None:
                try:
                    row.allowed = row.constraint.allowed()
                except Exception as error:  # noqa: BLE001 - the caller's code; the loop must live
                    self._fail(row, error)
                    continue
            kept.append(row)
        return kept

    def _fail(self, row: Row, error: Exception) -> None:
        live = self._live.get(row.request.id)
        if live is None:  # answered already
            return
        live.output.error = f"{type(error).__name__}: {error}"
        self._end(live, FinishReason.ERROR)

    def _nap(self) -> float | None:
        """How long an idle loop may sleep: until an order comes, or the next deadline."""
        deadlines = [live.request.deadline for live in self._live.values() if live.request.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self, request: Request, times: RequestTimes) -> None:
        try:
            self._begin(request, times)
        except Exception as error:  # noqa: BLE001 - the request's own parts; it fails alone
            why = f"{type(error).__name__}: {error}"
            live = self._live.pop(request.id, None)
            if live is None:
                output = GenerationOutput(
                    prompt_len=len(request.prompt_ids), finish_reason=FinishReason.ERROR, error=why
                )
                guarded(request.on_done, output)
            else:
                live.output.error = why
                live.answer(FinishReason.ERROR, self.metrics)

    def _begin(self, request: Request, times: RequestTimes) -> None:
        params = request.params
        seed = secrets.randbits(64) if params.seed is None else params.seed & (2**64 - 1)
        prompt_len = len(request.prompt_ids)
        room = min(self.max_context, self.scheduler.capacity)
        wanted = room if params.max_tokens is None else prompt_len + params.max_tokens
        eos = frozenset() if params.ignore_eos else frozenset(self.tokenizer.eos_ids)
        row = Row(
            request=request,
            tokens=list(request.prompt_ids),
            limit=min(wanted, room),
            seed=seed,
            stop_ids=params.stop_ids | eos,
        )
        output = GenerationOutput(prompt_len=prompt_len, seed=seed)
        if params.prompt_logprobs:
            output.prompt_logprobs = [None] * prompt_len
        live = Live(request, row, AnswerText(self.tokenizer, params.stop), output, times)
        self._live[request.id] = live
        self.metrics.requests += 1
        self.metrics.prompt_tokens += prompt_len
        fits = room if params.max_tokens == 0 else room - 1
        if prompt_len > fits:
            output.error = f"the prompt has {prompt_len} tokens, {fits} fit"
            self._close(live, FinishReason.REJECTED)
        elif params.max_tokens == 0 and not (params.prompt_logprobs and prompt_len > 1):
            self._close(live, FinishReason.LENGTH)
        else:
            row.constraint = None if params.constraint is None else params.constraint()
            self.scheduler.add(row)

    def _hand_out(self, rows: Sequence[Row], drawn: Drawn) -> None:
        for at, row in enumerate(rows):
            live = self._live[row.request.id]
            token, raw = drawn.tokens[at], drawn.raw_logprobs[at]
            if math.isnan(raw):
                self._fail(row, NOT_FINITE)
                continue
            if not math.isfinite(drawn.logprobs[at]):
                self._fail(row, EngineError("stop ids, bias and constraint leave no token that may be drawn"))
                continue
            self.scheduler.advance(row, token)
            output = live.output
            output.token_ids.append(token)
            output.logprobs.append(drawn.logprobs[at])
            output.raw_logprobs.append(raw)
            if live.request.params.apart:
                output.tempered_logprobs.append(drawn.tempered_logprobs[at])
            output.token_versions.append(self.scheduler.version)
            if drawn.best is not None and live.request.params.top_logprobs:
                output.top_logprobs.append(drawn.best[at])
            self.metrics.token(self.scheduler.version, live.times)
            try:
                reason = live.push(token)
                if reason is not None:
                    self._end(live, reason)
            except Exception as error:  # noqa: BLE001 - the request's own parts; it fails alone
                self._fail(row, error)

    def _end(self, live: Live, reason: FinishReason) -> None:
        """Takes a row that the scheduler holds out of it, and answers."""
        self.scheduler.finish(live.row)
        self._close(live, reason)

    def _close(self, live: Live, reason: FinishReason) -> None:
        del self._live[live.request.id]
        live.answer(reason, self.metrics)

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
            if live.answered or live.row in self.scheduler.running:
                live.output.error = f"{type(error).__name__}: {error}"
                self._end(live, FinishReason.ERROR)
        if self._failures >= MAX_FAILURES:
            self._dead = f"the engine failed {self._failures} times in a row, last: {error}"
        else:
            self.scheduler.forget()
            self.runner.reset()


def _read(params: Params) -> str:
    """The fingerprint; `EngineError` when an array is not there any more."""
    try:
        return fingerprint(params)
    except Exception as error:  # whatever the device says of an array that was given away
        raise EngineError(f"weights could not be swapped: {error}") from error
