"""Anthropic Messages bodies → `Asked`: their messages and tools become those of a chat, the rest is read as there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from upweight.errors import RequestError
from upweight.inference.constraints import MakeConstraint
from upweight.server.worker import fields
from upweight.server.worker.asked import Asked, Serving
from upweight.server.worker.fields import Body, refuse
from upweight.server.worker.openai_requests import check_room, read_timeout
from upweight.server.worker.sampling_fields import sampling_params, with_constraint
from upweight.server.worker.tools import read_tools

_KNOWN = {
    "model", "messages", "max_tokens", "system", "stop_sequences", "stream", "temperature", "top_p", "top_k", "tools",
    "tool_choice", "seed", "timeout", "output_config",
}  # fmt: skip
# Fields of the public API that change nothing about the tokens of an answer.
_INERT = {"metadata", "service_tier", "cache_control"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"thinking": ({"type": "disabled"},), "betas": ([],), "mcp_servers": ([],)}
_COUNTED = {"model", "messages", "system", "tools", "tool_choice"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAMPLED = ("max_tokens", "temperature", "top_p", "top_k", "seed")


def parse_messages(body: Body, serving: Serving) -> Asked:
    """`max_tokens` is required, as in the public API."""
    fields.only(body, _KNOWN, _INERT, _NEUTRAL)
    if body.get("max_tokens") is None:
        raise RequestError(
            f"max_tokens is missing; it must be a whole number from 1 to {serving.max_context}", field="max_tokens"
        )
    tooling = read_tools(_tool_fields(body), serving)
    sampled: dict[str, Any] = {name: body.get(name) for name in _SAMPLED}
    fields.texts(body, "stop_sequences", 16)
    prompt = serving.encode_chat(_chat(body), tooling.told)
    params = sampling_params({**sampled, "stop": body.get("stop_sequences")}, serving, len(prompt), least_tokens=1)
    constraint = _output_format(body, serving)
    if constraint is not None:
        params = with_constraint(params, constraint, "output_config")
    if tooling.constraint is not None:
        if constraint is not None:
            raise RequestError("output_config and tool_choice demand two different answers", field="output_config")
        params = with_constraint(params, tooling.constraint, "tool_choice")
    check_room([prompt], serving, "messages")
    return Asked(
        prompts=[prompt],
        params=[params],
        stream=fields.flag(body, "stream"),
        tools=tooling.use,
        timeout=read_timeout(body, serving),
    )


def _output_format(body: Body, serving: Serving) -> MakeConstraint | None:
    config = fields.object_of(body, "output_config")
    for name, value in config.items():
        if name != "format" and value is not None:
            raise RequestError(f"output_config.{name} is not offered; leave it out", field="output_config")
    given = fields.object_of(config, "format")
    if not given:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise refuse("output_config.format", given, '{"type": "json_schema", "schema": {…}}')
    return serving.grammars.json_schema(given["schema"], field="output_config")


def count_tokens(body: Body, serving: Serving) -> int:
    """Tokens of the prompt that the same body would be answered from."""
    fields.only(body, _COUNTED, _INERT, _NEUTRAL)
    tooling = read_tools(_tool_fields(body), serving)
    return len(serving.encode_chat(_chat(body), tooling.told))


def _chat(body: Body) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", messages, "a list of at least one message")
    system = body.get("system")
    chat = [] if system is None else [{"role": "system", "content": _text(system, "system")}]
    for index, message in enumerate(messages):
        chat += _chat_messages(message, f"messages[{index}]")
    return chat


def _chat_messages(message: Any, where: str) -> list[dict[str, Any]]:
    """One message with blocks → a message a tool result, then one with the text and the calls."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
        raise RequestError(f"{where} must have role user or assistant", field="messages")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}: content must be text or a list of blocks", field="messages")
    results, texts, calls = [], [], []
    for number, block in enumerate(content):
        place = f"{where}.content[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind == "text":
            texts.append(_text([block], place))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, place))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, place))
        elif not (kind in ("thinking", "redacted_thinking") and role == "assistant"):
            raise RequestError(f"{place}: a block of type {kind!r} is not understood here", field="messages")
    said: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        said["tool_calls"] = calls
    return [*results, *([said] if texts or calls or not results else [])]


def _text(content: Any, where: str) -> str:
    """Text, or the text of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of text blocks", field=where.partition("[")[0])
    texts = []
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise RequestError(
                f'{where}: only {{"type": "text", "text": …}} blocks are understood', field=where.partition("[")[0]
            )
        texts.append(block["text"])
    return "".join(texts)


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, given, call_id = block.get("name"), block.get("input"), block.get("id")
    if not isinstance(name, str) or not isinstance(given, Mapping) or not isinstance(call_id, str):
        raise RequestError(f"{where}: a tool_use block needs id, name and an input object", field="messages")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise RequestError(f"{where}: a tool_result block needs the tool_use_id of its call", field="messages")
    content = block.get("content")
    text = "" if content is None else _text(content, f"messages{where.removeprefix('messages')}")
    if block.get("is_error"):
        text = f"error: {text}"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _tool_fields(body: Body) -> dict[str, Any]:
    """`tools` and `tool_choice` as a chat request has them."""
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise refuse("tools", tools, "a list of tools")
    told = [_tool(tool, index) for index, tool in enumerate(tools or [])]
    choice = fields.object_of(body, "tool_choice")
    several = not fields.flag(choice, "disable_parallel_tool_use")
    return {"tools": told, "tool_choice": _choice(choice), "parallel_tool_calls": several}


def _tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        raise RequestError(f"tools[{index}] must be an object with name and input_schema", field="tools")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestError(f"tools[{index}].input_schema must be a JSON schema, which is an object", field="tools")
    function = {"name": tool.get("name"), "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> Any:
    if not choice:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise refuse("tool_choice.type", kind, "auto, any, tool or none")
    return _CHOICES[kind]
