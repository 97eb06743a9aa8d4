"""`InferenceScheduler`: the engine behind the calls that library code and rollouts use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from upweight.errors import ConfigError
from upweight.inference.engine import Engine
from upweight.inference.types import GenerationOutput, SamplingParams
from upweight.models.decoder import Decoder
from upweight.models.layers import Params
from upweight.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")


class InferenceScheduler:
    """One engine on a model's own arrays. Every method may be called from any thread; callers share the same batches.

    `enable_cuda_graph` is accepted for compatibility: decode steps are always compiled. `device`, `dtype`, `cache` and
    `backend` must be None, since the engine runs on the model's arrays as they are.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        max_batch_size: int = 16,
        max_seq_len: int | None = None,
        device: Any = None,
        dtype: Any = None,
        cache: Any = None,
        enable_cuda_graph: bool = True,
        backend: Any = None,
    ) -> None:
        for name, value in {"device": device, "dtype": dtype, "cache": cache, "backend": backend}.items():
            if value is not None:
                raise ConfigError(f"{name} = {value!r} is not offered; leave it out")
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size is {max_batch_size}; it must be at least 1")
        self.model = model
        self.engine = Engine(model.config, model.params(), tokenizer, max_rows=max_batch_size, max_context=max_seq_len)

    def start(self) -> None:
        """Starts the loop; `run_batch` does so by itself."""
        self.engine.start()

    def stop(self) -> None:
        self.engine.stop()

    def __enter__(self) -> InferenceScheduler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def weights_version(self) -> int:
        return self.engine.version

    def set_weights(self, params: Params, version: int) -> str:
        """Swaps between two steps; returns the fingerprint of the arrays that decode receives from now on."""
        return self.engine.start().set_weights(params, version)

    def get_stats(self) -> dict[str, float]:
        return self.engine.stats()

    def run_batch(
        self,
        prompt_ids_list: Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int] | None = None,
        temperature: float | Sequence[float] = 1.0,
        top_p: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 50,
        frequency_penalty: float | Sequence[float] = 0.0,
        rep_window: int = 64,
        return_logprobs: bool = False,
        seed: int | Sequence[int] | None = None,
        stop_ids: Sequence[int] | None = None,
        stop: Sequence[str] | None = None,
        ignore_eos: bool = False,
        min_tokens: int = 0,
        return_details: bool = False,
    ) -> Any:
        """Completions in input order: token lists, `(token_ids, logprobs)` pairs, or `GenerationOutput`s.

        Sampling arguments are one value or one per prompt; `max_tokens` None means up to the context. A prompt that cannot fit
        gives an empty entry (`rejected` in the details) and one warning. `ValueError` for an empty prompt, naming its index,
        before anything runs.
        """
        count = len(prompt_ids_list)
        for index, prompt in enumerate(prompt_ids_list):
            if not len(prompt):
                raise ValueError(f"prompt {index} is empty")
        columns: dict[str, list[Any]] = {
            "max_tokens": _per_prompt("max_tokens", max_tokens, count),
            "temperature": _per_prompt("temperature", temperature, count),
            "top_p": _per_prompt("top_p", top_p, count),
            "top_k": _per_prompt("top_k", top_k, count),
            "frequency_penalty": _per_prompt("frequency_penalty", frequency_penalty, count),
            "seed": _per_prompt("seed", seed, count),
        }
        shared: dict[str, Any] = {
            "rep_window": rep_window,
            "stop_ids": frozenset(stop_ids or ()),
            "stop": tuple(stop or ()),
            "ignore_eos": ignore_eos,
            "min_tokens": min_tokens,
        }
        params = [
            SamplingParams(**{name: column[i] for name, column in columns.items()}, **shared) for i in range(count)
        ]
        outputs = self.engine.start().generate(prompt_ids_list, params)
        _warn_of_failures(outputs)
        if return_details:
            return outputs
        if return_logprobs:
            return [(output.token_ids, output.logprobs) for output in outputs]
        return [output.token_ids for output in outputs]


def _per_prompt(name: str, value: T | Sequence[T], count: int) -> list[T]:
    if isinstance(value, Sequence):
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} values for {count} prompts")
        return list(value)
    return [value] * count


def _warn_of_failures(outputs: Sequence[GenerationOutput]) -> None:
    failed = [output for output in outputs if output.error is not None]
    if failed:
        log.warning("%d of %d prompts were not answered; the first: %s", len(failed), len(outputs), failed[0].error)
