"""What a chat template writes between a sampled answer and the next prompt, as token ids, without re-encoding the history.

Invariants
1. A bridge is cut out of a render of a *stand-in* history of two short messages, so its cost depends on the new messages only.
2. The cut is by token ids: stand-in answers that end differently share exactly the ids that follow the answer.
3. Where the cut is not certain (the template repeats, moves or refuses something) there is no bridge: the caller renders
   everything anew and starts a new sample there.
4. What the template does to earlier turns is found out once, before the first answer, and said in words.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from upweight.api_client import BadRequestError
from upweight.errors import RequestError

Message = Mapping[str, Any]

# Last characters of different kinds: a tokenizer that merges over the seam does not merge with all of them.
STAND_INS = ("quartz zebra k", "quartz zebra 7", "quartz zebra)", "quartz zebra W")
ASKED: Message = {"role": "user", "content": "Begin."}
NEXT: Message = {"role": "user", "content": "Go on."}
THOUGHT = "<think>\nquartz\n</think>\n\n"


@dataclass(frozen=True)
class Rendered:
    """`text` and its `token_ids`."""

    token_ids: list[int]
    text: str


class Render(Protocol):
    """The model's chat template and tokenizer: the server's render route, or a local one.

    Raises `RequestError` or `BadRequestError` for messages that the template refuses.
    """

    def __call__(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None, add_generation_prompt: bool
    ) -> Rendered: ...


class TurnBridge:
    """Bridges for one template and one list of tools. Thread-safe; the first call that needs it examines the template."""

    def __init__(self, render: Render, tools: Sequence[Message] | None = None) -> None:
        self._render_route = render
        self._tools = tools
        self._lock = threading.Lock()
        self._examined = False
        self._stand_in = STAND_INS[0]
        self._before: list[int] = []  # ids of the stand-in history up to the end of its answer
        self._end_id: int | None = None  # None = no bridge exists
        self._tools_matter = True
        self._rewrites: list[str] = []

    @property
    def rewrites(self) -> list[str]:
        """What the template does to earlier turns, in words; empty if they stay as they were sampled."""
        self._examine()
        return list(self._rewrites)

    def whole(self, messages: Sequence[Message]) -> list[int]:
        """The prompt after all of `messages`; costs all their tokens."""
        return self._render(messages, self._tools).token_ids

    def between(self, new: Sequence[Message]) -> list[int] | None:
        """Ids from the end-of-turn token of an answer to the next answer's first place; None where no cut is certain."""
        self._examine()
        if self._end_id is None:
            return None
        tools = self._tools if self._tools_matter else None
        try:
            rendered = self._render([ASKED, _answer(self._stand_in), *new], tools)
        except (RequestError, BadRequestError):
            return self._after_tool_calls(new) if new and new[0].get("role") == "tool" else None
        n = len(self._before)
        is_certain = rendered.token_ids[:n] == self._before and rendered.text.count(self._stand_in) == 1
        return rendered.token_ids[n:] if is_certain else None

    def _after_tool_calls(self, new: Sequence[Message]) -> list[int] | None:
        """For templates that accept tool results only after the calls: cut at the end-of-turn token after the calls."""
        results = list(itertools.takewhile(lambda message: message.get("role") == "tool", new))
        try:
            found = [self._render([ASKED, _caller(results, word), *new], self._tools) for word in STAND_INS[:2]]
        except (RequestError, BadRequestError):
            return None
        shared = _common_suffix(found[0].token_ids, found[1].token_ids)
        return shared[shared.index(self._end_id) :] if self._end_id in shared else None

    def _render(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> Rendered:
        return self._render_route(messages, tools=tools, add_generation_prompt=True)

    # -- examination, once

    def _examine(self) -> None:
        with self._lock:
            if self._examined:
                return
            try:
                self._find_seam()
                self._find_rewrites()
            except (RequestError, BadRequestError) as error:
                self._rewrites.append(f"refuses a user message after an answer ({error})")
                self._end_id = None
            self._examined = True

    def _find_seam(self) -> None:
        found = [self._render([ASKED, _answer(word), NEXT], self._tools) for word in STAND_INS]
        counts = {one.text.count(word) for one, word in zip(found, STAND_INS, strict=True)}
        if counts != {1}:
            self._rewrites.append(f"writes one answer {max(counts - {1})} times")
            return
        pairs = itertools.combinations(range(len(found)), 2)
        tails = {i: _common_suffix(found[i].token_ids, found[j].token_ids) for i, j in pairs}
        # Of ids merged over the seam fewer are shared, so the longest tail is the one that was encoded by itself.
        best = max(tails, key=lambda i: len(tails[i]))
        tail = tails[best]
        if not tail:
            return
        self._stand_in, self._end_id = STAND_INS[best], tail[0]
        self._before = found[best].token_ids[: len(found[best].token_ids) - len(tail)]
        self._tools_matter = bool(self._tools) and not self._is_same_without_tools(tail)

    def _is_same_without_tools(self, tail: list[int]) -> bool:
        bare = self._render([ASKED, _answer(self._stand_in), NEXT], None).token_ids
        if bare[len(bare) - len(tail) :] != tail:
            return False
        self._before = bare[: len(bare) - len(tail)]
        return True

    def _find_rewrites(self) -> None:
        prompt = self._render([ASKED], self._tools).text
        word, other = STAND_INS[0], STAND_INS[1]
        second = self._text(_answer(word), NEXT)
        if not second.startswith(prompt + word):
            self._rewrites.append("writes a prompt differently once its answer follows")
        if f"\n {word} \n" not in self._text(_answer(f"\n {word} \n"), NEXT):
            self._rewrites.append("strips white space from earlier answers")
        if THOUGHT.strip() not in self._text(_answer(THOUGHT + word), NEXT):
            self._rewrites.append("drops <think> parts of earlier answers")
        if not self._text(_answer(word), NEXT, _answer(other), NEXT).startswith(second + other):
            self._rewrites.append("writes a turn differently once later ones follow")

    def _text(self, *later: Message) -> str:
        return self._render([ASKED, *later], self._tools).text


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _caller(results: Sequence[Message], word: str) -> Message:
    calls = [
        {
            "id": result.get("tool_call_id", "call00000"),
            "type": "function",
            "function": {"name": result.get("name", "tool"), "arguments": json.dumps({"argument": word})},
        }
        for result in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _common_suffix(a: list[int], b: list[int]) -> list[int]:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return a[len(a) - n :]
