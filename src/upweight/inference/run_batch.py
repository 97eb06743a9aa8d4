"""`InferenceScheduler`: the engine behind the calls that library code and rollouts use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from upweight.errors import ConfigError, RequestError
from upweight.inference.arguments import sampling_params, token_ids
from upweight.inference.checks import check_whole
from upweight.inference.engine import STORE_BYTES, CacheOnUpdate, Engine, OnUpdate
from upweight.inference.gather import answers_to
from upweight.inference.placement import Placement, place, placement
from upweight.inference.types import FinishReason, GenerationOutput, OnDone, OnText, SamplingParams
from upweight.models.layers import Params
from upweight.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class InferenceScheduler:
    """One engine on a model's own arrays. Every method may be called from any thread; callers share the same batches.

    `model` has a `config` and `params` (a `Decoder` or a `LoadedModel`). Its arrays are used as they are, unless `device` or
    `dtype` ask for others. `enable_cuda_graph` is accepted for compatibility: decode steps are always compiled. `cache` and
    `backend` must be None. `on_update` and `cache_on_update` say what a change of weights means for rows that run and for
    cached prefixes. `max_queue` bounds the requests that wait, `store_bytes` the keys and values that are kept.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        max_batch_size: int = 16,
        max_seq_len: int | None = None,
        device: Any = None,
        dtype: Any = None,
        cache: Any = None,
        enable_cuda_graph: bool = True,
        backend: Any = None,
        *,
        on_update: OnUpdate = "continue",
        cache_on_update: CacheOnUpdate = "version",
        max_queue: int = 4096,
        store_bytes: int = STORE_BYTES,
    ) -> None:
        _refuse_others(cache=cache, backend=backend)
        check_whole("max_batch_size", max_batch_size, 1)
        if max_seq_len is not None:
            check_whole("max_seq_len", max_seq_len, 1)
        self.model = model
        self._placement: Placement | None = placement(device, dtype)
        params = model.params() if callable(model.params) else model.params
        self.engine = Engine(
            model.config,
            place(params, self._placement),
            tokenizer,
            max_rows=max_batch_size,
            max_context=_context(model.config, max_seq_len),
            on_update=on_update,
            cache_on_update=cache_on_update,
            max_queue=max_queue,
            store_bytes=store_bytes,
        )

    @classmethod
    def on_engine(cls, engine: Engine, model: Any = None) -> InferenceScheduler:
        """The same calls on an engine that others use as well, such as that of a server. `stop` ends it for all."""
        scheduler = cls.__new__(cls)
        scheduler.model, scheduler.engine, scheduler._placement = model, engine, None
        return scheduler

    def start(self) -> None:
        """Starts the loop; `run_batch`, `add_task` and `score` do so by themselves."""
        self.engine.start()

    def stop(self) -> None:
        self.engine.stop()

    def __enter__(self) -> InferenceScheduler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def weights_version(self) -> int:
        return self.engine.version

    def set_weights(self, params: Params, version: int) -> str:
        """Swaps between two steps; returns the fingerprint of the arrays that decode receives from now on."""
        return self.engine.start().set_weights(self.placed(params), version)

    def placed(self, params: Params) -> Params:
        """The parameters on this scheduler's device and in its dtype; the same arrays where they are so already."""
        return place(params, self._placement)

    def get_stats(self) -> dict[str, Any]:
        """The engine's own: counts since the start, averages over the last requests, what runs and waits now."""
        return self.engine.stats()

    def add_task(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 50,
        frequency_penalty: float = 0.0,
        rep_window: int = 64,
        backend: Any = None,
        stream_callback: Callable[[str], None] | None = None,
        *,
        seed: int | None = None,
        stop_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        min_tokens: int = 0,
        on_done: OnDone | None = None,
        timeout: float | None = None,
    ) -> int:
        """Queues one completion and returns its id, which no other task of this process ever has.

        `stream_callback` gets each piece of text once it can no longer change, `on_done` the `GenerationOutput`, exactly once;
        both run in the engine's thread and must return at once. `RequestError` for an invalid request, `EngineBusy` when the
        queue is full. After `timeout` seconds the task is aborted.
        """
        _refuse_others(backend=backend)
        params = sampling_params(
            1,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            frequency_penalty=frequency_penalty,
            rep_window=rep_window,
            seed=seed,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            stop_ids=stop_ids,
            stop=stop,
        )[0]
        engine = self.engine.start()
        done = on_done or (lambda output: None)
        give = stream_callback
        on_text: OnText | None = None if give is None else lambda piece: give(piece.text)
        return engine.submit(self.encode(prompt), params, done, on_text=on_text, timeout=timeout)

    def remove_task(self, task_id: int) -> None:
        """Aborts a task before the next step, from any thread; unknown and finished ones are ignored."""
        self.engine.cancel(task_id)

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of a prompt that is text or ids already; nothing is added."""
        return token_ids(self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def run_batch(
        self,
        prompt_ids_list: Sequence[Sequence[int]],
        *,
        max_tokens: Any = None,
        temperature: Any = 1.0,
        top_p: Any = 1.0,
        top_k: Any = 50,
        frequency_penalty: Any = 0.0,
        rep_window: Any = 64,
        return_logprobs: bool = False,
        seed: Any = None,
        stop_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: Any = False,
        min_tokens: Any = 0,
        return_details: bool = False,
    ) -> Any:
        """Completions in input order: token lists, `(token_ids, logprobs)` pairs, or `GenerationOutput`s.

        Sampling arguments are one value or one per prompt; `max_tokens` None means up to the context. A prompt that cannot fit
        gives an empty entry (`rejected` in the details) and one warning. `ValueError` for an empty prompt or one with what is no
        token id, naming its index, before anything runs.
        """
        prompts = _prompts(prompt_ids_list)
        params = sampling_params(
            len(prompts),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            frequency_penalty=frequency_penalty,
            rep_window=rep_window,
            seed=seed,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            stop_ids=stop_ids,
            stop=stop,
        )
        outputs = answers_to(self.engine.start(), prompts, params)
        if return_details:
            return outputs
        _warn_of_failures(outputs)
        if return_logprobs:
            return [(output.token_ids, output.logprobs) for output in outputs]
        return [output.token_ids for output in outputs]

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float | Sequence[float] = 1.0
    ) -> list[list[float]]:
        """log p(ids[t] | ids[:t]) at the given temperature for t = 1, 2, …: one number fewer than a sequence has ids.

        By the engine's own numerics and present weights. `RequestError` when a sequence does not fit the context.
        """
        prompts = _prompts(sequences)
        asked = sampling_params(len(prompts), max_tokens=0, temperature=temperature, top_k=0)
        params = [SamplingParams(**{**vars(one), "prompt_logprobs": True}) for one in asked]
        outputs = answers_to(self.engine.start(), prompts, params)
        return [_scores(index, output) for index, output in enumerate(outputs)]


def _prompts(given: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    prompts = [token_ids(prompt, f"prompt {index}") for index, prompt in enumerate(given)]
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError(f"prompt {index} is empty", field="prompt")
    return prompts


def _scores(index: int, output: GenerationOutput) -> list[float]:
    if output.finish_reason is not FinishReason.LENGTH or output.prompt_logprobs is None:
        raise RequestError(
            f"sequence {index} was not scored: {output.error or output.finish_reason}", field="sequences"
        )
    return [float(value) for value in output.prompt_logprobs[1:] if value is not None]


def _context(config: Any, wanted: int | None) -> int:
    """Tokens that prompt and answer may have together."""
    own = int(getattr(config, "max_context", None) or 0)
    if not wanted and not own:
        raise ConfigError("max_seq_len is not given and the model's config has no max_position_embeddings: give one")
    if wanted and own and wanted > own:
        log.warning("max_seq_len is %d, but the model's positions end at %d: that is the limit", wanted, own)
    return min(size for size in (wanted, own) if size)


def _refuse_others(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} = {value!r} is not offered; leave it out")


def _warn_of_failures(outputs: Sequence[GenerationOutput]) -> None:
    failed = [output for output in outputs if output.error is not None]
    if failed:
        log.warning("%d of %d prompts were not answered; the first: %s", len(failed), len(outputs), failed[0].error)
