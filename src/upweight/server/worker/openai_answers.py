"""Generation outputs → OpenAI answer bodies, with the additions of the wire contract (ids, versions, raw log-probs)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from upweight.inference.types import FinishReason, GenerationOutput, SampledTokens
from upweight.server.worker.asked import Asked, ToolUse
from upweight.server.worker.spoken import new_call_id, spoken
from upweight.server.worker.token_names import ChatLogprobs, TextLogprobs, TokenNames, prompt_text
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
        version = first_version(outputs)
        body: dict[str, Any] = {
            **self.base,
            "choices": [self._choice(index, output, version) for index, output in enumerate(outputs)],
            "usage": usage(self.asked, outputs),
            "inference_version": version,
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

    def logprobs(self, index: int) -> ChatLogprobs | TextLogprobs | None:
        """What tells the log-probs of choice `index`, whole or part by part; None if they were not asked for."""
        if not self.asked.logprobs:
            return None
        if self.chat:
            return ChatLogprobs(self._names)
        alternatives = self.asked.params[index].top_logprobs > 0
        return TextLogprobs(self._names, self.tokenizer, alternatives=alternatives, text_before=self.echoed(index))

    def echoed(self, index: int) -> str:
        """What stands before the answer's text."""
        return prompt_text(self.tokenizer, self.asked.prompt_of(index)) if self.asked.echo else ""

    def _choice(self, index: int, output: GenerationOutput, version: int | None) -> dict[str, Any]:
        told = {"index": index, **told_of_tokens(output, self._logprobs(index, output))}
        if not self.chat:
            return {**told, **told_at_end(output, False, version), "text": self.echoed(index) + output.text}
        found = spoken(self.tokenizer, self.asked.tools, output)
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.calls and self.asked.tools is not None:
            message["content"] = found.content or None
            message["tool_calls"] = [called(call, self.asked.tools) for call in found.calls]
        return {**told, **told_at_end(output, bool(found.calls), version), "message": message}

    def _logprobs(self, index: int, output: GenerationOutput) -> dict[str, Any] | None:
        teller = self.logprobs(index)
        if teller is None:
            return None
        told = teller.of(output)
        if self.asked.echo and isinstance(teller, TextLogprobs):
            prompt = teller.of_prompt(self.asked.prompt_of(index), output.prompt_logprobs)
            return {name: None if told[name] is None else [*prompt[name], *told[name]] for name in told}
        return told


def told_of_tokens(tokens: SampledTokens, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """What a choice, or a part of it, says about its tokens."""
    told = {"token_ids": tokens.token_ids, "raw_logprobs": tokens.raw_logprobs, "logprobs": logprobs}
    return {**told, "tempered_logprobs": tokens.tempered_logprobs} if tokens.tempered_logprobs else told


def told_at_end(output: GenerationOutput, calls: bool, version: int | None) -> dict[str, Any]:
    """What a choice says once. `version`: that of the answer; tokens of other versions make the choice list them all."""
    entry: dict[str, Any] = {"finish_reason": finish_reason(output, calls), "seed": output.seed}
    if set(output.token_versions) - {version}:
        entry["token_inference_versions"] = output.token_versions
    return entry


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
