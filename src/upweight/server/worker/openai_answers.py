"""Generation outputs → OpenAI answer bodies, with the additions of the wire contract (ids, versions, raw log-probs)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from upweight.inference.types import FinishReason, GenerationOutput
from upweight.server.worker.openai_requests import Asked


def answer(kind: str, model: str, asked: Asked, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    """`kind` is "chat.completion" or "text_completion"; outputs come prompt by prompt, `n` each."""
    chat = kind == "chat.completion"
    body: dict[str, Any] = {
        "id": new_id(chat),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice(chat, index, asked, output) for index, output in enumerate(outputs)],
        "usage": usage(asked, outputs),
        "inference_version": first_version(outputs),
    }
    if asked.token_ids:
        body["prompt_token_ids"] = asked.prompts[0]
        if len(asked.prompts) > 1:
            per_prompt = len(asked.params)
            for index, entry in enumerate(body["choices"]):
                entry["prompt_token_ids"] = asked.prompts[index // per_prompt]
    return body


def choice(chat: bool, index: int, asked: Asked, output: GenerationOutput) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "index": index,
        "finish_reason": str(output.finish_reason),
        "logprobs": logprobs(chat, output) if asked.logprobs else None,
        "token_ids": output.token_ids,
        "raw_logprobs": output.raw_logprobs,
        "seed": output.seed,
    }
    if chat:
        entry["message"] = {"role": "assistant", "content": output.text}
    else:
        entry["text"] = output.text
    if len(set(output.token_versions)) > 1:
        entry["token_inference_versions"] = output.token_versions
    return entry


def logprobs(chat: bool, output: GenerationOutput) -> dict[str, Any]:
    names = [f"token_id:{token}" for token in output.token_ids]
    if chat:
        content: list[dict[str, Any]] = [
            {"token": name, "logprob": value, "bytes": None, "top_logprobs": []}
            for name, value in zip(names, output.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": names,
        "token_logprobs": output.logprobs,
        "top_logprobs": None,
        "text_offset": [0] * len(names),
    }


def usage(asked: Asked, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    prompt = sum(len(p) for p in asked.prompts)
    made = sum(len(output.token_ids) for output in outputs)
    cached = sum(output.cached_tokens for output in outputs[:: len(asked.params)])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def first_version(outputs: Sequence[GenerationOutput]) -> int | None:
    """Version of the first token generated."""
    versions = [output.token_versions[0] for output in outputs if output.token_versions]
    return min(versions, default=None)


def new_id(chat: bool) -> str:
    return ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)


def failure(output: GenerationOutput) -> tuple[int, str] | None:
    """(HTTP status, message) of an output that is no answer."""
    if output.finish_reason is FinishReason.REJECTED:
        return 400, f"messages or prompt is too long: {output.error}"
    if output.finish_reason is FinishReason.ABORTED:
        return 503, f"the request was aborted: {output.error}"
    if output.finish_reason is FinishReason.ERROR:
        return 500, f"the request failed: {output.error}"
    return None
