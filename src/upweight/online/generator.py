"""Grouped generation through the engine that also serves.

Invariants
- A row that could not be answered (`rejected`, `aborted`, `error`) has an empty mask and an empty text, even when some
  tokens were drawn before.
- The model is in evaluation mode during generation and has its former mode afterwards, whatever happens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from upweight.inference import FinishReason, GenerationOutput, InferenceScheduler
from upweight.inference.arguments import sampling_params
from upweight.inference.checks import check_request
from upweight.online.data import RawRollout, SamplingTransform
from upweight.online.evaluation_mode import evaluation_mode
from upweight.online.prompts import read_prompts

log = logging.getLogger(__name__)

ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


class RolloutGenerator:
    """G responses for each prompt of a batch, with behaviour log-probs; knows nothing of rewards.

    `ValueError` or `RequestError` names a setting that no rollout could be drawn with.
    """

    def __init__(
        self,
        scheduler: InferenceScheduler,
        tokenizer: Any,
        max_tokens: int = 1024,
        group_size: int = 8,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        frequency_penalty: float = 0.0,
        rep_window: int = 64,
        *,
        seed: int | None = None,
        stop_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> None:
        for name, value in (("group_size", group_size), ("max_tokens", max_tokens)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        check_request(
            [0],
            sampling_params(
                1,
                temperature=_given("temperature", temperature),
                top_k=_given("top_k", top_k),
                top_p=_given("top_p", top_p),
                frequency_penalty=_given("frequency_penalty", frequency_penalty),
                rep_window=_given("rep_window", rep_window),
                min_tokens=_given("min_tokens", min_tokens),
                seed=seed,
                stop=stop,
            )[0],
            vocab_size=1,
        )
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.group_size = group_size
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.frequency_penalty = frequency_penalty
        self.rep_window = rep_window
        self.seed = seed
        self.stop_ids = stop_ids
        self.stop = stop
        self.min_tokens = min_tokens
        self.ignore_eos = ignore_eos
        self._calls = 0

    @property
    def transform(self) -> SamplingTransform:
        """Of the distribution that the next rollout is drawn from."""
        return SamplingTransform(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
        )

    def generate(self, batch: Mapping[str, Any]) -> RawRollout:
        """One rollout of the batch (keys: `messages`, `instruction`, `input_ids` or `prompts`).

        Rows that could not be answered have an empty `response_mask` and say why in `finish_reasons`; `RuntimeError` when
        that is so for all, or when the engine's answer does not fit the request.
        """
        prompts = read_prompts(batch, self.tokenizer)
        rows = [ids for ids in prompts.ids for _ in range(self.group_size)]
        with evaluation_mode(getattr(self.scheduler, "model", None)):
            outputs = self.scheduler.run_batch(
                rows,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                frequency_penalty=self.frequency_penalty,
                rep_window=self.rep_window,
                seed=self._seeds(len(rows)),
                stop_ids=self.stop_ids,
                stop=self.stop,
                min_tokens=self.min_tokens,
                ignore_eos=self.ignore_eos,
                return_details=True,
            )
        _check(outputs, len(rows))
        grouped = [outputs[i : i + self.group_size] for i in range(0, len(outputs), self.group_size)]
        return RawRollout(
            prompts=jnp.asarray(prompts.padded),
            prompt_mask=jnp.asarray(prompts.mask),
            prompt_texts=prompts.texts,
            metadata=prompts.metadata,
            response_texts=[[output.text if _is_answered(output) else "" for output in group] for group in grouped],
            finish_reasons=[[str(output.finish_reason) for output in group] for group in grouped],
            transform=self.transform,
            **_arrays(grouped),
        )

    def _seeds(self, count: int) -> list[int] | None:
        """Different for every row and every call, repeatable when a seed was given."""
        if self.seed is None:
            return None
        first = (self.seed << 32) + self._calls
        self._calls += count
        return list(range(first, first + count))


def _given(name: str, value: Any) -> Any:
    """None would mean the default of `run_batch`, which is another one than here."""
    if value is None:
        raise ValueError(f"{name} is None; give a number, or leave it out")
    return value


def _is_answered(output: GenerationOutput) -> bool:
    return output.finish_reason in ANSWERED and bool(output.token_ids)


def _check(outputs: Sequence[GenerationOutput], expected: int) -> None:
    if len(outputs) != expected:
        raise RuntimeError(f"the engine gave {len(outputs)} answers for {expected} prompts")
    for index, output in enumerate(outputs):
        if not len(output.token_ids) == len(output.logprobs) == len(output.raw_logprobs):
            raise RuntimeError(
                f"answer {index} has {len(output.token_ids)} tokens and {len(output.logprobs)} log-probs"
            )
    failed = [output for output in outputs if not _is_answered(output)]
    if not failed:
        return
    first = failed[0].error or failed[0].finish_reason
    if len(failed) == expected:
        raise RuntimeError(f"no prompt of the batch was answered; the first: {first}")
    log.warning(
        "%d of %d responses could not be produced and are left out; the first: %s", len(failed), expected, first
    )


def _arrays(grouped: Sequence[Sequence[GenerationOutput]]) -> dict[str, Any]:
    answered = [output for group in grouped for output in group if _is_answered(output)]
    shape = (len(grouped), len(grouped[0]), max(len(output.token_ids) for output in answered))
    responses, versions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    logprobs, raw = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    mask = np.zeros(shape, bool)
    for b, group in enumerate(grouped):
        for g, output in enumerate(group):
            if not _is_answered(output):
                continue
            n = len(output.token_ids)
            mask[b, g, :n] = True
            responses[b, g, :n] = output.token_ids
            logprobs[b, g, :n] = output.logprobs
            raw[b, g, :n] = output.raw_logprobs
            versions[b, g, :n] = output.token_versions
    changed = bool((versions != versions[:, :, :1])[mask].any())
    return {
        "responses": jnp.asarray(responses),
        "response_mask": jnp.asarray(mask),
        "logprobs_old": jnp.asarray(logprobs),
        "logprobs_raw": jnp.asarray(raw),
        "weights_version": jnp.asarray(versions[:, :, 0]),
        "token_versions": jnp.asarray(versions) if changed else None,
    }
