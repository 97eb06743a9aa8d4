"""Chat messages → text, by the model's own Jinja2 template.

Invariants
- Templates come with downloaded models: they run in a sandbox that can neither reach attributes nor change its input.
- Declared tools reach the model also where its template knows none: they are spelled out as text then.
- A message that cannot be rendered is a `RequestError` with field "messages"; no template error escapes as it is.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from upweight.errors import RequestError, UnsupportedModel
from upweight.tokenizer.tool_calls import knows_tools, spell_out

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part of a template; its text is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Safe to use from several threads."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        self._named_tokens = dict(named_tokens)
        self._knows_tools = knows_tools(source)
        self._knows_calls = self._knows_tools or "tool_calls" in source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedModel(f"the chat template does not parse: {error.message}, line {error.lineno}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        keep_calls: bool = False,
    ) -> str:
        """The text of `messages`; `RequestError` (field "messages") when one is malformed or the template refuses.

        `keep_calls`: calls of the history are spelled out for a template that would drop them, also without `tools`.
        """
        plain = [plain_message(message, index) for index, message in enumerate(_as_sequence(messages))]
        dropped = keep_calls and not self._knows_calls and any(message.get("tool_calls") for message in plain)
        if dropped or (tools and not self._knows_tools):
            plain, tools = spell_out(plain, tools), None
        try:
            return self._template.render(
                self._named_tokens,
                messages=plain,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        # A template can fail in every way that an expression can: a missing key, a sum of text and None, …
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise RequestError(f"messages: the chat template refuses them: {error}", field="messages") from error


def plain_message(message: Message, index: int) -> dict[str, Any]:
    """`message` as templates expect it: a known role, content as one string, arguments of tool calls as objects."""
    if not isinstance(message, Mapping):
        _refuse(index, f"must be an object with role and content, it is {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        _refuse(index, f"role is {role!r}, it must be one of {', '.join(ROLES)}")
    plain = {**message, "content": _content_text(message, index)}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence):
            _refuse(index, f"tool_calls must be a list, it is {type(calls).__name__}")
        plain["tool_calls"] = [_plain_call(call, index) for call in calls]
    return plain


def _content_text(message: Message, index: int) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        _refuse(index, f"content must be text or a list of text parts, it is {type(content).__name__}")
    return "".join(_part_text(part, index) for part in content)


def _part_text(part: Any, index: int) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        _refuse(index, f'content has a part of type {kind!r}, only {{"type": "text", "text": …}} is understood')
    return part["text"]


def _plain_call(call: Any, index: int) -> dict[str, Any]:
    """The wire format carries the arguments as JSON text, templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(index, "each of tool_calls needs a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            _refuse(index, f"arguments of the call of {function['name']} are not JSON")
    return {**call, "function": {**function, "arguments": arguments}}


def _as_sequence(messages: Any) -> Sequence[Message]:
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        return messages
    raise RequestError(f"messages must be a list of messages, it is {type(messages).__name__}", field="messages")


def _refuse(index: int, problem: str) -> NoReturn:
    raise RequestError(f"messages[{index}]: {problem}", field="messages")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)
