"""Reads from a request and its answer what the store must remember of each completion."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

import numpy as np

from upweight.server.store.completions import Served
from upweight.server.store.rows import completion_key

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
SETTINGS_KEPT = (*SETTINGS, "logit_bias", "max_tokens", "max_completion_tokens", "seed", "stop", "min_tokens")
NEUTRAL = {"top_p": 1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}


def sampling_of(request: dict[str, Any]) -> tuple[float, bool, dict[str, Any]]:
    """(temperature, filtered, settings kept) of a request. Greedy counts as temperature 1, filtered: see training_data."""
    settings = {name: request[name] for name in SETTINGS_KEPT if request.get(name) is not None}
    given = settings.get("temperature", 1.0)
    temperature = float(given) if isinstance(given, int | float) else 1.0
    filtered = any(settings.get(name, neutral) != neutral for name, neutral in NEUTRAL.items())
    filtered = filtered or any(_is_set(settings.get(name, 0)) for name in ("top_k", "min_tokens"))
    filtered = filtered or bool(settings.get("logit_bias")) or temperature == 0.0 or _constrained(request)
    return (temperature or 1.0), filtered, settings


def _is_set(value: object) -> bool:
    """Whether a count is one. What is no number was answered by some worker all the same; it counts as set."""
    return not isinstance(value, int | float) or value > 0


def _constrained(request: dict[str, Any]) -> bool:
    """Whether a grammar may have left tokens out."""
    form, choice = request.get("response_format") or {}, request.get("tool_choice")
    is_text = isinstance(form, dict) and form.get("type", "text") == "text"
    return not is_text or choice not in (None, "none", "auto")


def served_of(request: dict[str, Any], answer: dict[str, Any]) -> list[Served]:
    """One entry per choice whose prompt and output ids the answer tells; others cannot be joined and are left out.

    Prompt and version stand in the answer, or in a choice where they are its own.
    """
    temperature, filtered, settings = sampling_of(request)
    whole = "tempered_logprobs" if filtered and temperature != 1.0 else "raw_logprobs"
    found = []
    for choice in answer.get("choices", []):
        prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
        output, logprobs = _output_of(choice)
        if not output or not _is_ids(prompt):
            continue
        found.append(
            Served(
                key=completion_key(np.asarray(prompt, dtype="<i4"), np.asarray(output, dtype="<i4")),
                logprobs=_floats(logprobs, len(output)),
                raw_logprobs=_floats(choice.get(whole), len(output)),
                versions=_versions(answer, choice, len(output)),
                temperature=temperature,
                filtered=filtered,
                settings=settings,
                finish_reason=choice.get("finish_reason"),
            )
        )
    return found


def _is_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(token, int) for token in value)


def _output_of(choice: dict[str, Any]) -> tuple[list[int], list[float] | None]:
    """Output ids and their log-probabilities, of a chat or a text completion."""
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content")
    if content is not None:
        named = [entry["token"] for entry in content]
        values: list[float] | None = [entry["logprob"] for entry in content]
    else:
        named, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs")
    output = choice.get("token_ids")
    if _is_ids(output):
        # With `echo` the values of the prompt stand before those of the output.
        return output, values[len(values) - len(output) :] if values is not None else None
    numbers = [name.removeprefix("token_id:") for name in named]
    return ([int(number) for number in numbers] if all(number.isdecimal() for number in numbers) else []), values


def _floats(values: object, count: int) -> bytes | None:
    if not isinstance(values, list) or len(values) != count:
        return None
    return np.asarray(values, dtype="<f4").tobytes()


def _versions(answer: dict[str, Any], choice: dict[str, Any], count: int) -> bytes:
    per_token = choice.get("token_inference_versions")
    if _is_ids(per_token) and len(per_token) == count:
        return np.asarray(per_token, dtype="<i4").tobytes()
    version = choice.get("inference_version", answer.get("inference_version"))
    return np.full(count, version if isinstance(version, int) else -1, dtype="<i4").tobytes()


class StreamReader:
    """Puts the answer of a streamed completion together again from its server-sent events."""

    def __init__(self) -> None:
        self.rest = b""  # the beginning of an event
        self._choices: dict[int, dict[str, Any]] = {}

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that are complete now, each with the empty line at its end."""
        *events, self.rest = (self.rest + chunk).split(b"\n\n")
        return [event + b"\n\n" for event in events]

    def take(self, event: bytes) -> list[dict[str, Any]]:
        """The choices that are complete with this event, each told once."""
        done = []
        for line in event.split(b"\n"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                done += self.left()
            elif line.startswith(b"data:"):
                done += self._take(json.loads(data))
        return done

    def left(self) -> list[dict[str, Any]]:
        """Choices that were not told as complete."""
        choices, self._choices = list(self._choices.values()), {}
        return choices

    def _take(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        done = []
        for part in event.get("choices") or []:
            index = part.get("index", 0)
            whole = self._choices.setdefault(index, {"logprobs": {}})
            for name in ("prompt_token_ids", "inference_version"):  # of this chunk's choices
                if event.get(name) is not None:
                    whole.setdefault(name, event[name])
            for name in ("token_ids", "raw_logprobs", "tempered_logprobs", "token_inference_versions"):
                if isinstance(part.get(name), list):
                    whole.setdefault(name, []).extend(part[name])
            for name, values in (part.get("logprobs") or {}).items():
                if isinstance(values, list):
                    whole["logprobs"].setdefault(name, []).extend(values)
            if part.get("finish_reason") is not None:
                whole["finish_reason"] = part["finish_reason"]
                done.append(self._choices.pop(index))
        return done
