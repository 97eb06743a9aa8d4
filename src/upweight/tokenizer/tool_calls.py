"""Tool calls as models write them: found in answers, spelled out for templates that know no tools, demanded by a grammar.

| style | an answer with one call |
|---|---|
| HERMES | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; text may stand before (Qwen and most others) |
| LLAMA | `{"name": …, "parameters": {…}}` and nothing else; several are separated by `;` |
| MISTRAL | `[TOOL_CALLS][{"name": …, "arguments": {…}}]` |

Invariants:
* Arguments of a call are the text of a JSON object; what is not that, or names a function that was not declared, stays text.
* Nothing is lost: an answer without calls is returned as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

OPEN, CLOSE, CALLS, PYTHON = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
_DECODER = json.JSONDecoder()
_LIST_BEGINS = re.compile(r"\[TOOL_CALLS\]|\[\s*(\{|\Z)")


class ToolStyle(StrEnum):
    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True)
class Spoken:
    """An answer taken apart: what is said, and what is called."""

    content: str
    calls: tuple[ToolCall, ...] = ()


def knows_tools(template: str) -> bool:
    """Whether a chat template writes tools by itself."""
    return re.search(r"\btools\b", template) is not None


def style_of(template: str | None) -> ToolStyle:
    """The way in which a model with this chat template calls tools; HERMES where we tell it how."""
    if template is None or not knows_tools(template):
        return ToolStyle.HERMES
    if CALLS in template:
        return ToolStyle.MISTRAL
    if OPEN not in template and (PYTHON in template or '"parameters"' in template):
        return ToolStyle.LLAMA
    return ToolStyle.HERMES


def take_apart(text: str, style: ToolStyle, declared: Collection[str]) -> Spoken:
    """Content and calls of a whole answer."""
    if style is ToolStyle.LLAMA:
        calls = _bare_calls(text.strip().removeprefix(PYTHON), declared)
        return Spoken("", calls) if calls else Spoken(text)
    if style is ToolStyle.MISTRAL:
        before, marker, after = text.partition(CALLS)
        calls, end = _call_list(after, declared) if marker else _call_list(text, declared)
        before, after = (before, after) if marker else ("", text)
        return Spoken((before.rstrip() + after[end:]).rstrip(), calls) if calls else Spoken(text)
    return _tagged_calls(text, declared)


def settled(text: str, style: ToolStyle) -> int:
    """How much of an unfinished answer is content, whatever follows."""
    begun = text.lstrip()
    if style is ToolStyle.LLAMA:
        return 0 if not begun or begun[0] == "{" or _overlap(begun, PYTHON) else len(text.rstrip())
    if style is ToolStyle.MISTRAL:
        # The marker may be a special token, which leaves no text: a list of objects may be calls wherever it begins.
        begins = _LIST_BEGINS.search(text)
        known = begins.start() if begins else len(text) - _beginning(text, CALLS)
        return len(text[:known].rstrip())
    at = text.find(OPEN)
    end = at if at >= 0 else len(text) - _beginning(text, OPEN)
    return len(text[:end].rstrip())


def spell_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Plain messages (see `chat.plain_message`) for a template that knows no tools: declarations, calls and results as text."""
    spelled = [_spelled(message) for message in messages]
    if not tools:
        return spelled
    declared = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = (
        f"You can call these functions, described as JSON one a line:\n{declared}\n"
        f'To call one, answer with\n{OPEN}\n{{"name": "its name", "arguments": {{its arguments}}}}\n{CLOSE}'
    )
    if spelled and spelled[0]["role"] in ("system", "developer"):
        first = {**spelled[0], "content": f"{spelled[0]['content']}\n\n{told}"}
        return [first, *spelled[1:]]
    return [{"role": "system", "content": told}, *spelled]


def call_grammar(
    style: ToolStyle, functions: Mapping[str, Mapping[str, Any]], *, several: bool, marker_id: int | None, space: str
) -> str:
    """Lark grammar of an answer that calls at least one of `functions` (name → JSON schema of its arguments).

    `marker_id`: the id of the style's marker if that is a special token, which no text can spell; `space`: regex of the
    space that JSON may hold.
    """
    key = "parameters" if style is ToolStyle.LLAMA else "arguments"
    rules, names = [], []
    for index, (name, schema) in enumerate(functions.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
        body = json.dumps({**schema, "x-guidance": {"whitespace_pattern": space}})
        rules += [f'call_{index}: {head} args_{index} "}}"', f"args_{index}: %json {body}"]
        names.append(f"call_{index}")
    marker = _marker_rule(style, marker_id)
    if style is ToolStyle.LLAMA:
        start = "one"
    elif style is ToolStyle.MISTRAL:
        start = f'{marker} "[" one ' + ('(", " one)* "]"' if several else '"]"')
    else:
        rules.append(f'block: {marker} "\\n" one "\\n{CLOSE}"')
        start = 'block ("\\n" block)*' if several else "block"
    return "\n".join([f"start: {start}", f"one: {' | '.join(names)}", *rules])


def marker_of(style: ToolStyle) -> str | None:
    return {ToolStyle.HERMES: OPEN, ToolStyle.MISTRAL: CALLS}.get(style)


def _marker_rule(style: ToolStyle, marker_id: int | None) -> str:
    return json.dumps(marker_of(style)) if marker_id is None else f"<[{marker_id}]>"


def _spelled(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        for call in message.get("tool_calls") or ()
    ]
    blocks = [f"{OPEN}\n{call}\n{CLOSE}" for call in calls]
    plain["content"] = "\n".join([*([plain["content"]] if plain["content"] or not blocks else []), *blocks])
    return plain


def _tagged_calls(text: str, declared: Collection[str]) -> Spoken:
    calls: list[ToolCall] = []
    said, done = "", 0
    for match in re.finditer(re.escape(OPEN), text):
        if match.start() < done:
            continue  # inside the arguments of the call before
        found, end = _tagged_call(text, match.end(), declared)
        if found:
            calls += found
            said += text[done : match.start()]
            done = end
    return Spoken((said + text[done:]).rstrip(), tuple(calls)) if calls else Spoken(text)


def _tagged_call(text: str, start: int, declared: Collection[str]) -> tuple[list[ToolCall], int]:
    """Calls in the block whose content begins at `start`, and where it ends; a model may leave the last tag unclosed."""
    parsed = _json_at(text, start)
    if parsed is None:
        return [], start
    value, end = parsed
    calls = [_call(entry, declared) for entry in (value if isinstance(value, list) else [value])]
    rest = text[end:].lstrip()
    if not rest.startswith(CLOSE) and rest:
        return [], start
    found = [call for call in calls if call is not None]
    if not found or len(found) < len(calls):
        return [], start
    return found, len(text) - len(rest) + (len(CLOSE) if rest else 0)


def _bare_calls(text: str, declared: Collection[str]) -> tuple[ToolCall, ...]:
    """Calls of a text that is nothing but calls; none otherwise."""
    calls = []
    for value in _json_values(text):
        call = _call(value, declared)
        if call is None:
            return ()
        calls.append(call)
    return tuple(calls)


def _json_values(text: str) -> Iterator[Any]:
    at = 0
    while at < len(text):
        parsed = _json_at(text, at)
        if parsed is None:
            yield None
            return
        value, at = parsed
        yield value
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n;"))


def _call_list(text: str, declared: Collection[str]) -> tuple[tuple[ToolCall, ...], int]:
    """Calls of the JSON list that `text` begins with, and where it ends."""
    parsed = _json_at(text, 0)
    if parsed is None or not isinstance(parsed[0], list):
        return (), 0
    calls = [_call(entry, declared) for entry in parsed[0]]
    found = tuple(call for call in calls if call is not None)
    return (found, parsed[1]) if len(found) == len(calls) else ((), 0)


def _json_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins at `start` (space before it is skipped) and where it ends."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _call(entry: Any, declared: Collection[str]) -> ToolCall | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or entry["name"] not in declared:
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as text
        parsed = _json_at(arguments, 0)
        arguments = parsed[0] if parsed is not None and not arguments[parsed[1] :].strip() else None
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(entry["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:  # NaN and Infinity are no JSON
        return None


def _beginning(text: str, marker: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _overlap(text: str, marker: str) -> bool:
    return text.startswith(marker) or marker.startswith(text)
