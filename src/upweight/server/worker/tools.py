"""`tools`, `tool_choice` and `response_format` of a chat request: what the template is told and what the answer must follow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upweight.errors import RequestError
from upweight.inference.constraints import WHITESPACE, MakeConstraint
from upweight.server.worker import fields
from upweight.server.worker.asked import Serving, ToolUse
from upweight.server.worker.fields import Body, refuse
from upweight.tokenizer.tool_calls import call_grammar, marker_of

MOST_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}\Z")
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class Tooling:
    """Tools of one request, read."""

    told: list[dict[str, Any]]  # for the template
    use: ToolUse | None  # None: nothing may be called
    constraint: MakeConstraint | None = None  # a call is demanded


NO_TOOLS = Tooling(told=[], use=None)


def read_tools(body: Body, serving: Serving) -> Tooling:
    """Raises `RequestError` for a malformed tool, a choice that names no declared one, a schema that cannot be used."""
    told = _declared(body)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or _ANY_OBJECT for tool in told}
    choice, several = body.get("tool_choice"), fields.flag(body, "parallel_tool_calls", True)
    if (choice in (None, "auto") and not told) or choice == "none":
        return NO_TOOLS
    named = _named(choice)
    if not told:
        raise refuse("tool_choice", choice, "none or left out without tools")
    if named is not None and named not in schemas:
        raise refuse("tool_choice", named, f"the name of a declared function: {', '.join(schemas)}")
    use = ToolUse(names=frozenset(schemas), style=serving.tokenizer.tool_style, several=several and named is None)
    if choice in (None, "auto"):
        return Tooling(told=told, use=use)
    wanted = schemas if named is None else {named: schemas[named]}
    return Tooling(told=told, use=use, constraint=_demanded(wanted, use, serving))


def read_response_format(body: Body, serving: Serving) -> MakeConstraint | None:
    """The grammar that `response_format` asks for; None for plain text."""
    field = "response_format"
    given = fields.object_of(body, field)
    kind = given.get("type") if given else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return serving.grammars.json_schema(_ANY_OBJECT, field=field)
    if kind != "json_schema":
        raise refuse("response_format.type", kind, "text, json_object or json_schema")
    wrapped = given.get("json_schema")
    if not isinstance(wrapped, Mapping):
        raise refuse("response_format.json_schema", wrapped, "an object with name and schema")
    schema = wrapped.get("schema")
    if not isinstance(schema, dict):
        raise refuse("response_format.json_schema.schema", schema, "a JSON schema, which is an object")
    return serving.grammars.json_schema(schema, field=field)


def _declared(body: Body) -> list[dict[str, Any]]:
    tools = body.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise refuse("tools", tools, f"a list of at most {MOST_TOOLS} tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, index)
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError(f"tools has two functions of the same name among {', '.join(names)}", field="tools")
    return tools


def _check_tool(tool: Any, index: int) -> None:
    where = f"tools[{index}]"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise RequestError(f'{where} must be {{"type": "function", "function": {{"name": …}}}}', field="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.match(name):
        raise RequestError(f"{where}: name is {name!r}; up to 64 of a-z A-Z 0-9 _ . - are allowed", field="tools")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"{where}: parameters must be a JSON schema, which is an object", field="tools")


def _named(choice: Any) -> str | None:
    """The function that `tool_choice` names; None for auto and required."""
    if choice in (None, "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        must = 'none, auto, required or {"type": "function", "function": {"name": …}}'
        raise refuse("tool_choice", choice, must)
    return name


def _demanded(schemas: Mapping[str, dict[str, Any]], use: ToolUse, serving: Serving) -> MakeConstraint:
    marker = special_marker(use, serving)
    grammar = call_grammar(use.style, schemas, several=use.several, marker_id=marker, space=WHITESPACE)
    return serving.grammars.grammar(grammar, field="tools")


def special_marker(use: ToolUse, serving: Serving) -> int | None:
    """Id of the token that begins a call, if it is a special one, which decoded text leaves out."""
    marker = marker_of(use.style)
    ids = serving.tokenizer.encode(marker) if marker else []
    return ids[0] if len(ids) == 1 and ids[0] in serving.tokenizer.special_ids else None
