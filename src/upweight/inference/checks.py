"""What a request may ask for: everything that can be known before it is queued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from upweight.errors import ConfigError, RequestError
from upweight.inference.types import SamplingParams
from upweight.ops.sampling import MOST_ALTERNATIVES

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 100
LEAST_REPETITION, MOST_REPETITION = 0.01, 100
MOST_BIAS = 100  # in either direction, as of the penalties below
MOST_PENALTY = 100
MOST_BIASES = 1024


def check_whole(name: str, value: int, least: int) -> None:
    """`ConfigError` for a setting that is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def check_request(prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    """`RequestError` names field, value and limit. What passes breaks no step, which would fail the other rows of it as well."""
    if not len(prompt_ids):
        raise RequestError("the prompt is empty", field="prompt")
    _in_vocabulary("prompt", prompt_ids, vocab_size)
    _in_vocabulary("stop_ids", params.stop_ids, vocab_size)
    for name in ("max_tokens", "min_tokens", "top_k", "rep_window", "top_logprobs"):
        value = getattr(params, name)
        if not isinstance(value, Integral) and not (value is None and name == "max_tokens"):
            raise RequestError(f"{name} is {value!r}; it must be a whole number", field=name)
    _in_range("temperature", params.temperature, 0, MOST_TEMPERATURE)
    if 0 < params.temperature < LEAST_TEMPERATURE:  # logits over it would leave the range of float32
        raise RequestError(
            f"temperature is {params.temperature}; it must be 0 (greedy) or at least {LEAST_TEMPERATURE}",
            field="temperature",
        )
    _in_range("top_p", params.top_p, 0, 1)
    _in_range("min_p", params.min_p, 0, 1)
    _in_range("top_k", params.top_k, 0, None)
    if params.max_tokens is not None:
        _in_range("max_tokens", params.max_tokens, 0, None)
    _in_range("min_tokens", params.min_tokens, 0, None)
    if params.min_tokens and len(params.stop_ids) >= vocab_size:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but all {vocab_size} token ids are stop ids, which may not come before",
            field="min_tokens",
        )
    _in_range("frequency_penalty", params.frequency_penalty, -MOST_PENALTY, MOST_PENALTY)
    _in_range("presence_penalty", params.presence_penalty, -MOST_PENALTY, MOST_PENALTY)
    _in_range("repetition_penalty", params.repetition_penalty, LEAST_REPETITION, MOST_REPETITION)
    _in_range("rep_window", params.rep_window, 0, None)
    _in_range("top_logprobs", params.top_logprobs, 0, MOST_ALTERNATIVES)
    if params.seed is not None and (isinstance(params.seed, bool) or not isinstance(params.seed, int)):
        raise RequestError(f"seed is {params.seed!r}; it must be a whole number", field="seed")
    for stop in params.stop:
        if not isinstance(stop, str) or not stop:
            raise RequestError(f"stop holds {stop!r}; it must hold texts, none of them empty", field="stop")
    _check_bias(params.logit_bias, vocab_size)


def check_timeout(seconds: float | None) -> None:
    """`RequestError` for what is no time that can pass; None = no limit."""
    if seconds is not None and (not isinstance(seconds, Real) or not 0 <= seconds < math.inf):
        raise RequestError(f"timeout is {seconds!r}; it must be a number of seconds from 0, or None", field="timeout")


def _check_bias(pairs: Sequence[tuple[int, float]], vocab_size: int) -> None:
    if len(pairs) > MOST_BIASES:
        raise RequestError(f"logit_bias has {len(pairs)} entries; at most {MOST_BIASES}", field="logit_bias")
    _in_vocabulary("logit_bias", [token for token, _ in pairs], vocab_size)
    for token, value in pairs:
        if not math.isfinite(value) or abs(value) > MOST_BIAS:
            raise RequestError(
                f"logit_bias of token {token} is {value}; it must be from -{MOST_BIAS} to {MOST_BIAS}",
                field="logit_bias",
            )


def _in_vocabulary(field: str, ids: Sequence[int] | frozenset[int], vocab_size: int) -> None:
    where = "" if field == "prompt" else f"{field}: "
    other = next((i for i in ids if type(i) is not int and not isinstance(i, Integral)), 0)
    if not isinstance(other, Integral):
        raise RequestError(f"{where}{other!r} is no token id, which is a whole number", field=field)
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"{where}token id {wrong} is outside the vocabulary of {vocab_size}", field=field)


def _in_range(field: str, value: float, low: float, high: float | None) -> None:
    if not isinstance(value, Real):
        raise RequestError(f"{field} is {value!r}; it must be a number", field=field)
    if not value >= low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{field} is {value}; it must be {bound}", field=field)
