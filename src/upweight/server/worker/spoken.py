"""What an answer says and calls, whole or while it comes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from upweight.inference.types import GenerationOutput
from upweight.server.worker.asked import ToolUse
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.tool_calls import Spoken, ToolStyle, marker_of, settled, take_apart

_ALPHABET = string.ascii_letters + string.digits


def spoken(tokenizer: Tokenizer, tools: ToolUse | None, output: GenerationOutput) -> Spoken:
    """Content and calls of an answer; without tools all of it is content."""
    if tools is None:
        return Spoken(output.text)
    found = take_apart(_with_marker(tokenizer, tools, output), tools.style, tools.names)
    if not found.calls:
        return Spoken(output.text)
    return found if tools.several else Spoken(found.content, found.calls[:1])


class ContentStream:
    """Content of one choice of a stream; what may turn out to be a call is held back until the end."""

    def __init__(self, tools: ToolUse | None) -> None:
        self._tools = tools
        self._text = ""
        self.sent = 0  # characters of content that went out

    def push(self, piece: str) -> str:
        """The content that is certain now."""
        self._text += piece
        end = len(self._text) if self._tools is None else settled(self._text, self._tools.style)
        fresh = self._text[self.sent : end]
        self.sent = max(self.sent, end)
        return fresh

    def finish(self, tokenizer: Tokenizer, output: GenerationOutput) -> Spoken:
        """The rest of the content, and the calls."""
        found = spoken(tokenizer, self._tools, output)
        sent = self._text[: self.sent]
        if not found.content.startswith(sent):  # a call behind something that was taken for content
            found = Spoken(output.text)
        return Spoken(found.content[len(sent) :], found.calls)


def new_call_id(style: ToolStyle) -> str:
    """Templates of MISTRAL models refuse any other length than nine."""
    if style is ToolStyle.MISTRAL:
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def _with_marker(tokenizer: Tokenizer, tools: ToolUse, output: GenerationOutput) -> str:
    """The text with the marker of a call where that is a special token, which text leaves out."""
    marker = marker_of(tools.style)
    ids: Sequence[int] = tokenizer.encode(marker) if marker else ()
    if marker is None or len(ids) != 1 or ids[0] not in tokenizer.special_ids or ids[0] not in output.token_ids:
        return output.text
    before = tokenizer.decode(output.token_ids[: output.token_ids.index(ids[0])])
    return before + marker + output.text[len(before) :] if output.text.startswith(before) else output.text
