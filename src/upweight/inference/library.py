"""`InferenceEngine`: text in, text out, from threads and from asyncio, over the same loop as everything else."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

from upweight.errors import EngineError, RequestError
from upweight.inference.arguments import plain
from upweight.inference.run_batch import InferenceScheduler
from upweight.inference.types import FinishReason, GenerationOutput
from upweight.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class InferenceEngine:
    """Starts its loop at once; `shutdown`, or leaving a `with` block, ends it.

    A prompt is text or token ids. Answers that could not be made raise: `RequestError` when the prompt cannot fit,
    `EngineError` when the engine was stopped or failed.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        max_batch_size: int = 1,
        max_seq_len: int | None = None,
        cache: Any = None,
        enable_cuda_graph: bool = True,
        backend: Any = None,
        **options: Any,
    ) -> None:
        self.scheduler = InferenceScheduler(
            model,
            tokenizer,
            max_batch_size,
            max_seq_len,
            cache=cache,
            enable_cuda_graph=enable_cuda_graph,
            backend=backend,
            **options,
        )
        self.scheduler.start()

    @classmethod
    def on_scheduler(cls, scheduler: InferenceScheduler) -> InferenceEngine:
        """The same calls on a scheduler that others use as well; `shutdown` ends it for all."""
        engine = cls.__new__(cls)
        engine.scheduler = scheduler
        scheduler.start()
        return engine

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Aborts what is running."""
        self.scheduler.stop()

    def get_stats(self) -> dict[str, Any]:
        return self.scheduler.get_stats()

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        stream: bool = False,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 50,
        frequency_penalty: float = 0.0,
        rep_window: int = 64,
        **more: Any,
    ) -> Any:
        """One prompt: its answer as text, or with `stream` a generator of pieces. Several: a list, or `(index, piece)` pairs.

        Further keywords are those of `InferenceScheduler.run_batch` (`seed`, `stop`, `stop_ids`, `ignore_eos`, `min_tokens`).
        Leaving a stream early frees its rows.
        """
        options = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "frequency_penalty": frequency_penalty,
            "rep_window": rep_window,
            **more,
        }
        alone = _is_one(prompt)
        several: Any = [prompt] if alone else prompt
        prompts = [self.scheduler.encode(one) for one in several]
        if stream:
            pairs = self._stream(prompts, options)
            return (piece for _, piece in pairs) if alone else pairs
        outputs = self.scheduler.run_batch(prompts, return_details=True, **options)
        texts = [_answered(index, output).text for index, output in enumerate(outputs)]
        return texts[0] if alone else texts

    async def generate_async(self, prompt: Prompt, **options: Any) -> AsyncIterator[str]:
        """Pieces of the answer to one prompt; keywords as in `generate`. No thread waits; leaving early frees the row."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | GenerationOutput] = asyncio.Queue()

        def put(item: str | GenerationOutput) -> None:
            if not loop.is_closed():  # whoever waited there is gone
                loop.call_soon_threadsafe(pieces.put_nowait, item)

        task = self.scheduler.add_task(prompt, stream_callback=put, on_done=put, **options)
        try:
            while isinstance(item := await pieces.get(), str):
                yield item
            _answered(0, item)
        finally:
            self.scheduler.remove_task(task)

    def _stream(self, prompts: Sequence[Sequence[int]], options: dict[str, Any]) -> Iterator[tuple[int, str]]:
        found: queue.SimpleQueue[tuple[int, str | GenerationOutput]] = queue.SimpleQueue()

        def putter(index: int) -> Callable[[Any], None]:
            return lambda item: found.put((index, item))

        running: dict[int, int] = {}
        try:
            for index, prompt in enumerate(prompts):
                own = putter(index)
                running[index] = self.scheduler.add_task(prompt, stream_callback=own, on_done=own, **options)
            while running:
                index, item = found.get()
                if isinstance(item, str):
                    yield index, item
                else:
                    del running[index]
                    _answered(index, item)
        finally:
            for task in running.values():
                self.scheduler.remove_task(task)


def _is_one(prompt: Any) -> bool:
    """Text, or a flat sequence of ids."""
    if isinstance(prompt, str):
        return True
    items = plain(prompt)
    if not isinstance(items, Sequence):
        raise RequestError(f"prompt is {prompt!r}; it must be a text, token ids, or a list of these", field="prompt")
    return bool(items) and all(isinstance(item, Integral) for item in items)


def _answered(index: int, output: GenerationOutput) -> GenerationOutput:
    if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        return output
    message = f"prompt {index} was not answered ({output.finish_reason}): {output.error}"
    if output.finish_reason is FinishReason.REJECTED:
        raise RequestError(message, field="prompt")
    raise EngineError(message)
