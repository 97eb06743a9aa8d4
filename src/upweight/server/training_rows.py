"""One line of a training file as conversations with marked answers; whatever is wrong with it is told by field.

Both forms of a preference pair become the same: a text is one message, of the user in a prompt, of the assistant in an answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from upweight.errors import RequestError
from upweight.tokenizer.chat import plain_message

ROW_KEYS = {
    "supervised": ("messages", "tools", "parallel_tool_calls"),
    "dpo": ("input", "preferred_output", "non_preferred_output", "prompt", "chosen", "rejected", "tools"),
}
MESSAGE_KEYS = ("role", "content", "name", "weight", "tool_calls", "tool_call_id", "reasoning_content", "refusal")
SLIP = 0.75  # likeness from which an unknown key counts as a known one misspelled
PAIR_FORMS = (("input", "preferred_output", "non_preferred_output"), ("prompt", "chosen", "rejected"))


class RowError(ValueError):
    """A row that cannot be trained on; `field` says where."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages as a chat template takes them, and which of them (all of the assistant) are trained."""

    messages: Sequence[Mapping[str, Any]]
    trained: Sequence[bool]
    tools: Sequence[Mapping[str, Any]] | None = None


def conversations(row: object, kind: str) -> tuple[Conversation, ...]:
    """Of a `supervised` row the one, of a `dpo` row the chosen and the rejected. Raises RowError."""
    if not isinstance(row, dict):
        raise RowError("", f"the line must be a JSON object, it is {type(row).__name__}")
    _refuse_slips(row, ROW_KEYS[kind], "")
    return (_supervised(row),) if kind == "supervised" else _pair(row)


def _supervised(row: dict[str, Any]) -> Conversation:
    _needed(row, ("messages",), "")
    messages, weights = _messages(row["messages"], "messages")
    trained = _trained(messages, weights, "messages")
    if trained[0]:
        raise RowError("messages[0]", "a trained assistant message needs a message before it; add one, or weight 0")
    return Conversation(messages=messages, trained=trained, tools=_tools(row, "tools"))


def _trained(messages: list[dict[str, Any]], weights: list[int], field: str) -> list[bool]:
    trained = [m["role"] == "assistant" and w != 0 for m, w in zip(messages, weights, strict=True)]
    if not any(trained):
        raise RowError(field, "no assistant message is trained: there is none, or weight is 0 on all of them")
    return trained


def _pair(row: dict[str, Any]) -> tuple[Conversation, Conversation]:
    prompt_key, chosen_key, rejected_key = next((form for form in PAIR_FORMS if form[0] in row), PAIR_FORMS[0])
    if prompt_key not in row and (given := [key for form in PAIR_FORMS for key in form if key in row]):
        prompt_key, chosen_key, rejected_key = next(form for form in PAIR_FORMS if given[0] in form)
    _needed(row, (prompt_key, chosen_key, rejected_key), "")
    prompt, field, tools = row[prompt_key], prompt_key, _tools(row, "tools")
    if prompt_key == "input":
        if not isinstance(prompt, dict):
            raise RowError("input", f'must be an object {{"messages": […]}}, it is {type(prompt).__name__}')
        _refuse_slips(prompt, ROW_KEYS["supervised"], "input.")
        _needed(prompt, ("messages",), "input.")
        tools = _tools(prompt, "input.tools", tools)
        prompt, field = prompt["messages"], "input.messages"
    context, _ = _messages(_as_messages(prompt, "user"), field)
    (chosen, weights), (rejected, others) = (_answer(row[key], key) for key in (chosen_key, rejected_key))
    if chosen == rejected:
        raise RowError(rejected_key, f"is the same as {chosen_key}: there is nothing to prefer")
    return tuple(  # type: ignore[return-value]
        Conversation(
            messages=[*context, *answer],
            trained=[False] * len(context) + trained,
            tools=tools,
        )
        for answer, trained in ((chosen, weights), (rejected, others))
    )


def _answer(value: object, field: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """Messages, and which of them are trained."""
    messages, weights = _messages(_as_messages(value, "assistant"), field)
    if messages[0]["role"] != "assistant":
        raise RowError(
            f"{field}[0].role", f"is {messages[0]['role']!r}; an answer begins with a message of the assistant"
        )
    return messages, _trained(messages, weights, field)


def _as_messages(value: object, role: str) -> object:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _messages(value: object, field: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Messages without their weights, and the weights (1 where none is given)."""
    if not isinstance(value, list):
        raise RowError(field, f"must be a list of messages, it is {type(value).__name__}")
    if not value:
        raise RowError(field, "holds no message")
    plain, weights = [], []
    for index, message in enumerate(value):
        try:
            one = plain_message(message, index)
        except RequestError as error:
            raise RowError(f"{field}[{index}]", str(error).partition(": ")[2]) from error
        _refuse_slips(one, MESSAGE_KEYS, f"{field}[{index}].")
        weights.append(_weight(one, f"{field}[{index}].weight"))
        one.pop("weight", None)
        plain.append(one)
    return plain, weights


def _weight(message: dict[str, Any], field: str) -> int:
    weight = message.get("weight")
    if weight is None:
        return 1
    if isinstance(weight, bool) or weight not in (0, 1):
        raise RowError(field, f"is {weight!r}; it may be 0 or 1")
    if weight == 1 and message["role"] != "assistant":
        raise RowError(field, f"is 1 on a message of role {message['role']!r}; only the assistant's are trained")
    return int(weight)


def _tools(row: dict[str, Any], field: str, otherwise: Any = None) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if tools is None:
        return otherwise
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(field, "must be a list of objects")
    return tools or None


def _needed(row: dict[str, Any], keys: Sequence[str], where: str) -> None:
    for key in keys:
        if key not in row:
            _missing(f"{where}{key}", row)


def _missing(field: str, row: dict[str, Any]) -> NoReturn:
    found = ", ".join(repr(key) for key in list(row)[:8]) or "nothing"
    raise RowError(field, f"is missing; the line holds {found}")


def _refuse_slips(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Keys that nobody knows are left to the chat template, unless they look like one that is known."""
    for key in given:
        if key in known:
            continue
        if near := difflib.get_close_matches(str(key), known, n=1, cutoff=SLIP):
            raise RowError(f"{where}{key}", f"unknown key {key!r}; did you mean {near[0]!r}?")
