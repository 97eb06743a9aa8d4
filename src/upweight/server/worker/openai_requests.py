"""OpenAI request bodies → prompts and sampling parameters. What changes an answer is honoured or refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upweight.errors import RequestError
from upweight.inference.types import SamplingParams
from upweight.tokenizer import Tokenizer

MOST_CHOICES = 128
_SHARED = {
    "model", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "stream", "stream_options",
    "return_token_ids", "ignore_eos", "stop_token_ids",
}  # fmt: skip
_CHAT = _SHARED | {"messages", "max_completion_tokens", "top_logprobs"}
_TEXT = _SHARED | {"prompt"}
# Fields of the public API that change nothing about the tokens of an answer.
_INERT = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
# Fields that would change an answer, with the value under which they do nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One parsed request: every prompt is answered `n` times."""

    prompts: list[list[int]]
    params: list[SamplingParams]  # one a choice
    logprobs: bool
    token_ids: bool
    stream: bool
    usage_in_stream: bool


def parse_chat(body: Mapping[str, Any], tokenizer: Tokenizer, default_tokens: int) -> Asked:
    _check_fields(body, _CHAT)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message", field="messages")
    if body.get("top_logprobs"):
        raise RequestError("top_logprobs is not offered yet; leave it out", field="top_logprobs")
    return _asked(body, [tokenizer.encode_chat(messages)], default_tokens, _flag(body, "logprobs"))


def parse_text(body: Mapping[str, Any], tokenizer: Tokenizer, default_tokens: int) -> Asked:
    _check_fields(body, _TEXT)
    return _asked(body, _prompts(body.get("prompt"), tokenizer), default_tokens, _text_logprobs(body.get("logprobs")))


def _text_logprobs(wanted: Any) -> bool:
    """Whether log-probs are asked for. The number asks for alternatives; 0 and 1 mean the sampled token alone."""
    if wanted is None or isinstance(wanted, bool):
        return bool(wanted)
    if not isinstance(wanted, int) or not 0 <= wanted <= 1:
        raise RequestError(f"logprobs is {wanted!r}; alternatives are not offered yet, use 0 or 1", field="logprobs")
    return True


def _prompts(prompt: Any, tokenizer: Tokenizer) -> list[list[int]]:
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(p, str) for p in prompt):
            return [tokenizer.encode(p) for p in prompt]
        if all(isinstance(p, list) and _are_ids(p) for p in prompt):
            return prompt
    raise RequestError("prompt must be text, token ids, or a list of either", field="prompt")


def _asked(body: Mapping[str, Any], prompts: list[list[int]], default_tokens: int, logprobs: bool) -> Asked:
    n = _number(body, "n", 1, int)
    if not 1 <= n <= MOST_CHOICES:
        raise RequestError(f"n is {n}; it must be from 1 to {MOST_CHOICES}", field="n")
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = _number(body, limit, default_tokens, int)
    if max_tokens < 0:
        raise RequestError(f"{limit} is {max_tokens}; it must be at least 0", field=limit)
    seed = _number(body, "seed", None, int)
    options = {} if body.get("stream_options") is None else body["stream_options"]
    if not isinstance(options, dict):
        raise RequestError(f"stream_options is {options!r}; it must be an object", field="stream_options")
    shared: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": float(_number(body, "temperature", 1.0, float)),
        "top_p": float(_number(body, "top_p", 1.0, float)),
        "top_k": max(0, _number(body, "top_k", 0, int)),  # −1 means off in other servers
        "stop": _stop(body.get("stop")),
        "stop_ids": frozenset(_ids(body.get("stop_token_ids"))),
        "ignore_eos": _flag(body, "ignore_eos"),
    }
    params = [SamplingParams(seed=None if seed is None else seed + i, **shared) for i in range(n)]
    return Asked(
        prompts=prompts,
        params=params,
        logprobs=logprobs,
        token_ids=_flag(body, "return_token_ids"),
        stream=_flag(body, "stream"),
        usage_in_stream=bool(options.get("include_usage")),
    )


def _check_fields(body: Mapping[str, Any], known: set[str]) -> None:
    for field, value in body.items():
        if value is None or field in known or field in _INERT:
            continue
        if field not in _NEUTRAL:
            raise RequestError(f"unknown field {field!r}", field=field)
        if value not in _NEUTRAL[field]:
            raise RequestError(f"{field} is not offered yet; leave it out", field=field)


def _flag(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{field} is {value!r}; it must be true or false", field=field)
    return bool(value)


def _number(body: Mapping[str, Any], field: str, default: float | None, kind: type) -> Any:
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise RequestError(f"{field} is {value!r}; it must be a {'whole ' if kind is int else ''}number", field=field)
    return value


def _stop(value: Any) -> tuple[str, ...]:
    several = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(several, list) or not all(isinstance(s, str) and s for s in several) or len(several) > 16:
        raise RequestError("stop must be text or a list of up to 16 texts, none empty", field="stop")
    return tuple(several)


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list) or not _are_ids(value):
        raise RequestError("stop_token_ids must be a list of token ids", field="stop_token_ids")
    return value


def _are_ids(values: list[Any]) -> bool:
    return all(isinstance(i, int) and not isinstance(i, bool) for i in values)
