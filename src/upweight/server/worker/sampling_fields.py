"""The fields of a request that say how an answer is drawn → `SamplingParams`, one a choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from upweight.errors import RequestError
from upweight.inference.checks import (
    LEAST_REPETITION,
    LEAST_TEMPERATURE,
    MOST_BIAS,
    MOST_BIASES,
    MOST_REPETITION,
    MOST_TEMPERATURE,
)
from upweight.inference.types import SamplingParams, TokenConstraint
from upweight.server.worker import fields
from upweight.server.worker.asked import Serving
from upweight.server.worker.fields import Body, refuse

MOST_CHOICES = 128
MOST_STOPS = 16
SEEDS = (-(2**63), 2**64 - 1)

SAMPLING_FIELDS = {
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "rep_window", "logit_bias",
}  # fmt: skip


def sampling_params(
    body: Body, serving: Serving, prompt_len: int, *, max_tokens_field: str = "max_tokens", least_tokens: int = 0
) -> SamplingParams:
    """What all choices share; the seed is that of the first. `prompt_len`: tokens of the longest prompt."""
    max_tokens = _max_tokens(body, serving, prompt_len, max_tokens_field, least_tokens)
    min_tokens = fields.whole(body, "min_tokens", 0, 0, serving.max_context)
    if min_tokens > max_tokens:
        raise refuse("min_tokens", min_tokens, f"at most {max_tokens_field}, which is {max_tokens}")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_temperature(body),
        top_p=fields.number(body, "top_p", 1.0, 0, 1),
        top_k=max(0, fields.whole(body, "top_k", 0, -1, 2**31 - 1)),  # −1 means off in other servers
        min_p=fields.number(body, "min_p", 0.0, 0, 1),
        seed=fields.whole(body, "seed", None, *SEEDS),
        stop=fields.texts(body, "stop", MOST_STOPS),
        stop_ids=frozenset(_stop_ids(body, serving)),
        ignore_eos=fields.flag(body, "ignore_eos"),
        min_tokens=min_tokens,
        presence_penalty=fields.number(body, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number(body, "frequency_penalty", 0.0, -2, 2),
        repetition_penalty=fields.number(body, "repetition_penalty", 1.0, LEAST_REPETITION, MOST_REPETITION),
        rep_window=fields.whole(body, "rep_window", 64, 0, 2**31 - 1),
        logit_bias=_logit_bias(body, serving),
    )


def with_constraint(params: SamplingParams, make: Callable[[], TokenConstraint], why: str) -> SamplingParams:
    """`params` under a grammar. Refuses what would forbid the end where nothing else may follow."""
    if params.ignore_eos:
        raise RequestError(f"ignore_eos is True; with {why} the answer must be able to end", field="ignore_eos")
    if params.min_tokens:
        raise refuse("min_tokens", params.min_tokens, f"0 with {why}, where the answer ends when it is complete")
    return dataclasses.replace(params, constraint=make)


def one_a_choice(params: SamplingParams, choices: int) -> list[SamplingParams]:
    """Choice i draws from a stream of its own: seed + i."""
    if params.seed is None:
        return [params] * choices
    return [dataclasses.replace(params, seed=(params.seed + i) & (2**64 - 1)) for i in range(choices)]


def _max_tokens(body: Body, serving: Serving, prompt_len: int, field: str, least: int) -> int:
    try:
        value: int | None = fields.whole(body, field, None, least, serving.max_context)
    except RequestError as error:
        fit = max(0, serving.max_context - prompt_len)
        raise RequestError(
            f"{error}, the context; beside the prompt's {prompt_len} tokens {fit} fit", field=field
        ) from None
    return min(serving.default_tokens, serving.max_context) if value is None else value


def _temperature(body: Body) -> float:
    value: float = fields.number(body, "temperature", 1.0, 0, MOST_TEMPERATURE)
    if 0 < value < LEAST_TEMPERATURE:
        raise refuse("temperature", value, f"0 (greedy) or from {LEAST_TEMPERATURE} to {MOST_TEMPERATURE:g}")
    return value


def _stop_ids(body: Body, serving: Serving) -> list[int]:
    ids = body.get("stop_token_ids")
    if ids is None:
        return []
    if not fields.are_ids(ids) or not all(0 <= i < serving.vocab_size for i in ids):
        raise refuse("stop_token_ids", ids, f"a list of token ids from 0 to {serving.vocab_size - 1}")
    return list(ids)


def _logit_bias(body: Body, serving: Serving) -> tuple[tuple[int, float], ...]:
    given = fields.object_of(body, "logit_bias")
    if len(given) > MOST_BIASES:
        raise RequestError(f"logit_bias has {len(given)} tokens; at most {MOST_BIASES} are allowed", field="logit_bias")
    return tuple((_biased_id(name, serving), _bias(name, value)) for name, value in given.items() if value is not None)


def _biased_id(name: str, serving: Serving) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 12) or int(name) >= serving.vocab_size:
        raise RequestError(
            f"logit_bias names token {fields.short(name)}; it must be a token id from 0 to {serving.vocab_size - 1}",
            field="logit_bias",
        )
    return int(name)


def _bias(name: str, value: Any) -> float:
    if not fields.is_number(value) or not -MOST_BIAS <= value <= MOST_BIAS:
        raise RequestError(
            f"logit_bias of token {name} is {fields.short(value)}; it must be a number from -{MOST_BIAS} to {MOST_BIAS}",
            field="logit_bias",
        )
    return float(value)
