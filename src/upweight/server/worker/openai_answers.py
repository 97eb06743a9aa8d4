"""Generation outputs → OpenAI answer bodies, with the additions of the wire contract (ids, versions, raw log-probs)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from upweight.inference.types import FinishReason, GenerationOutput
from upweight.server.worker.asked import Asked, ToolUse
from upweight.server.worker.spoken import new_call_id, spoken
from upweight.server.worker.token_names import TokenNames, chat_logprobs, prompt_text, text_logprobs
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.tool_calls import ToolCall

CHAT, TEXT = "chat.completion", "text_completion"


class OpenAIAnswers:
    """Answers to one request. `kind` is CHAT or TEXT; choices come prompt by prompt, `n` each."""

    def __init__(self, kind: str, model: str, asked: Asked, tokenizer: Tokenizer) -> None:
        self.chat = kind == CHAT
        self.asked = asked
        self.tokenizer = tokenizer
        self._names = TokenNames(tokenizer, as_ids=asked.token_id_names)
        prefix = "chatcmpl-" if self.chat else "cmpl-"
        self.base = {"id": prefix + secrets.token_hex(12), "object": kind, "created": int(time.time()), "model": model}

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        body: dict[str, Any] = {
            **self.base,
            "choices": [self._choice(index, output) for index, output in enumerate(outputs)],
            "usage": usage(self.asked, outputs),
            "inference_version": first_version(outputs),
        }
        if self.asked.token_ids:
            body["prompt_token_ids"] = self.asked.prompts[0]
        if self.asked.prompt_logprobs:
            body["prompt_logprobs"] = outputs[0].prompt_logprobs
        if len(self.asked.prompts) > 1:
            for index, (choice, output) in enumerate(zip(body["choices"], outputs, strict=True)):
                choice |= self.of_prompt(index, output)
        return body

    def of_prompt(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        """What was asked about the prompt of choice `index`."""
        told: dict[str, Any] = {}
        if self.asked.token_ids:
            told["prompt_token_ids"] = self.asked.prompt_of(index)
        if self.asked.prompt_logprobs:
            told["prompt_logprobs"] = output.prompt_logprobs
        return told

    def details(self, index: int, output: GenerationOutput, calls: bool) -> dict[str, Any]:
        """A choice without its text."""
        entry: dict[str, Any] = {
            "index": index,
            "finish_reason": finish_reason(output, calls),
            "logprobs": self._logprobs(index, output),
            "token_ids": output.token_ids,
            "raw_logprobs": output.raw_logprobs,
            "seed": output.seed,
        }
        if len(set(output.token_versions)) > 1:
            entry["token_inference_versions"] = output.token_versions
        return entry

    def echoed(self, index: int) -> str:
        """What stands before the answer's text."""
        return prompt_text(self.tokenizer, self.asked.prompt_of(index)) if self.asked.echo else ""

    def _choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        if not self.chat:
            return {**self.details(index, output, False), "text": self.echoed(index) + output.text}
        found = spoken(self.tokenizer, self.asked.tools, output)
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.calls and self.asked.tools is not None:
            message["content"] = found.content or None
            message["tool_calls"] = [called(call, self.asked.tools) for call in found.calls]
        return {**self.details(index, output, bool(found.calls)), "message": message}

    def _logprobs(self, index: int, output: GenerationOutput) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        if self.chat:
            return chat_logprobs(self._names, output)
        found: dict[str, Any] = text_logprobs(self._names, self.tokenizer, self.asked, index, output)
        return found


def called(call: ToolCall, tools: ToolUse) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_call_id(tools.style), "type": "function", "function": function}


def finish_reason(output: GenerationOutput, calls: bool) -> str:
    """`length` stays `length`: a call may have been cut off behind those that were found."""
    if calls and output.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return str(output.finish_reason)


def usage(asked: Asked, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    """In tokens. Prompts count once, however many choices they have."""
    prompt = sum(len(p) for p in asked.prompts)
    made = sum(len(output.token_ids) for output in outputs)
    firsts = outputs[:: asked.n]
    details: dict[str, Any] = {"cached_tokens": sum(output.cached_tokens for output in firsts)}
    versions = {output.cached_version for output in firsts if output.cached_version is not None}
    if versions:
        details["cached_version"] = min(versions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": details,
    }


def first_version(outputs: Sequence[GenerationOutput]) -> int | None:
    """Version of the first token generated."""
    return min((o.weights_version for o in outputs if o.weights_version is not None), default=None)
