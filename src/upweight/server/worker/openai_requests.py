"""OpenAI request bodies → `Asked`. What changes an answer is honoured or refused, never ignored."""

from __future__ import annotations

import dataclasses
from typing import Any

from upweight.errors import RequestError
from upweight.inference.types import SamplingParams
from upweight.server.worker import fields
from upweight.server.worker.asked import Asked, Serving
from upweight.server.worker.fields import Body, refuse
from upweight.server.worker.sampling_fields import (
    MOST_CHOICES,
    SAMPLING_FIELDS,
    one_a_choice,
    sampling_params,
    with_constraint,
)
from upweight.server.worker.tools import read_response_format, read_tools

MOST_ALTERNATIVES, MOST_TEXT_ALTERNATIVES = 20, 5
LONGEST_TIMEOUT = 86_400.0  # seconds
_SHARED = SAMPLING_FIELDS | {
    "model", "n", "logprobs", "stream", "stream_options", "return_token_ids", "prompt_logprobs", "timeout",
    "response_format",
}  # fmt: skip
_CHAT = _SHARED | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"}
_TEXT = _SHARED | {"prompt", "echo", "best_of"}
# Fields of the public API that change nothing about the tokens of an answer.
_INERT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Fields that would change an answer, with the value under which they do nothing.
_CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {"modalities": (["text"],), "functions": ([],), "function_call": ("none",)}
_TEXT_NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": ("",)}


def parse_chat(body: Body, serving: Serving) -> Asked:
    fields.only(body, _CHAT, _INERT, _CHAT_NEUTRAL)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", messages, "a list of at least one message")
    logprobs = fields.flag(body, "logprobs")
    alternatives = fields.whole(body, "top_logprobs", 0, 0, MOST_ALTERNATIVES)
    if body.get("top_logprobs") is not None and not logprobs:
        raise RequestError(f"top_logprobs is {alternatives}, which needs logprobs true", field="top_logprobs")
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    tooling = read_tools(body, serving)
    prompt = serving.encode_chat(messages, tooling.told)
    params = _params(body, serving, len(prompt), limit, alternatives)
    if tooling.constraint is not None:
        if params.constraint is not None:
            raise RequestError("response_format and tool_choice demand two different answers", field="response_format")
        params = with_constraint(params, tooling.constraint, "tool_choice")
    return _asked(body, serving, [prompt], params, logprobs=logprobs, tools=tooling.use)


def parse_text(body: Body, serving: Serving) -> Asked:
    fields.only(body, _TEXT, _INERT, _TEXT_NEUTRAL)
    prompts = _prompts(body.get("prompt"), serving)
    logprobs, alternatives = _text_logprobs(body)
    echo = fields.flag(body, "echo")
    params = _params(body, serving, max(map(len, prompts)), "max_tokens", alternatives)
    if echo and alternatives:
        raise refuse("logprobs", alternatives, "0 with echo: alternatives of a prompt's tokens are not offered")
    if echo and logprobs:
        params = dataclasses.replace(params, prompt_logprobs=True)
    asked = _asked(body, serving, prompts, params, logprobs=logprobs, echo=echo)
    best_of = fields.whole(body, "best_of", None, 1, MOST_CHOICES)
    if best_of is not None and best_of != asked.n:
        raise refuse("best_of", best_of, f"equal to n, which is {asked.n}: choices are not ranked here")
    return asked


def _params(body: Body, serving: Serving, prompt_len: int, limit: str, alternatives: int) -> SamplingParams:
    params = sampling_params(body, serving, prompt_len, max_tokens_field=limit)
    params = dataclasses.replace(
        params, top_logprobs=alternatives, prompt_logprobs=fields.flag(body, "prompt_logprobs")
    )
    constraint = read_response_format(body, serving)
    return params if constraint is None else with_constraint(params, constraint, "response_format")


def _text_logprobs(body: Body) -> tuple[bool, int]:
    """(whether log-probs are told, how many alternatives a token).

    With `return_token_ids` 0 and 1 mean the drawn token alone: that is the contract of rollouts, which need no others.
    """
    value = body.get("logprobs")
    if value is None or isinstance(value, bool):
        return bool(value), 0
    most = fields.whole(body, "logprobs", 0, 0, MOST_TEXT_ALTERNATIVES)
    return True, 0 if most == 1 and body.get("return_token_ids") else most


def _prompts(prompt: Any, serving: Serving) -> list[list[int]]:
    if isinstance(prompt, str):
        found = [serving.encode(prompt, "prompt")]
    elif isinstance(prompt, list) and prompt and fields.are_ids(prompt):
        found = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(p, str) for p in prompt):
        found = [serving.encode(p, "prompt") for p in prompt]
    elif isinstance(prompt, list) and prompt and all(fields.are_ids(p) for p in prompt):
        found = prompt
    else:
        raise refuse("prompt", prompt, "text, token ids, or a list of either")
    for index, ids in enumerate(found):
        if not ids:
            raise RequestError(f"prompt {index} is empty; it needs at least one token", field="prompt")
        wrong = next((i for i in ids if not 0 <= i < serving.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"prompt has token id {fields.short(wrong)}; ids go from 0 to {serving.vocab_size - 1}", field="prompt"
            )
    return found


def _asked(body: Body, serving: Serving, prompts: list[list[int]], params: SamplingParams, **more: Any) -> Asked:
    n = fields.whole(body, "n", 1, 1, MOST_CHOICES)
    check_room(prompts, serving, "messages" if "messages" in body else "prompt", answered=params.max_tokens != 0)
    return Asked(
        prompts=prompts,
        params=one_a_choice(params, n * len(prompts)),
        n=n,
        token_ids=fields.flag(body, "return_token_ids"),
        token_id_names=fields.flag(body, "return_token_ids"),
        stream=fields.flag(body, "stream"),
        usage_in_stream=_usage_in_stream(body),
        prompt_logprobs=fields.flag(body, "prompt_logprobs"),
        timeout=read_timeout(body, serving),
        **more,
    )


def _usage_in_stream(body: Body) -> bool:
    name = "stream_options.include_usage"
    return fields.flag({name: fields.object_of(body, "stream_options").get("include_usage")}, name)


def read_timeout(body: Body, serving: Serving) -> float | None:
    longest = LONGEST_TIMEOUT if serving.timeout is None else serving.timeout
    value: float | None = fields.number(body, "timeout", serving.timeout, 0.001, longest)
    return value


def check_room(prompts: list[list[int]], serving: Serving, field: str, *, answered: bool = True) -> None:
    """Raises `RequestError` for a prompt that leaves no room for an answer."""
    longest = max(len(prompt) for prompt in prompts)
    most = serving.max_context - 1 if answered else serving.max_context
    if longest > most:
        raise RequestError(f"{field} too long: {longest} tokens, at most {most} fit the context", field=field)
