"""`upweight chat`: one answer, or a conversation on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import asdict

from upweight.cli.chat_voices import Answer, Message, Sampling, Voice, open_voice, tell
from upweight.cli.screen import print_json
from upweight.errors import ConfigError, UpweightError

HINT = "an empty line or Ctrl-D ends, /reset begins anew"
# A model may write any byte; on a terminal only text may come out of it.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def run_chat(
    target: str,
    *,
    prompt: str | None,
    system: str | None,
    sampling: Sampling,
    as_json: bool,
    url: str | None,
    key: str | None,
) -> None:
    """Raises errors of ours; what was said before stays on the screen."""
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise ConfigError("there is nothing to answer: give --prompt TEXT, or run it on a terminal")
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    with open_voice(target, url, key) as voice:
        if prompt is None:
            converse(voice, start, sampling)
        else:
            answer_once(voice, [*start, {"role": "user", "content": prompt}], sampling, as_json=as_json)


def answer_once(voice: Voice, messages: list[Message], sampling: Sampling, *, as_json: bool) -> None:
    answer = Answer()
    pieces = voice.say(messages, sampling, answer)
    if not as_json:
        show(pieces)
        return
    for _ in pieces:
        continue
    print_json({"model": voice.name, **asdict(answer), "seconds": round(answer.seconds, 3)})


def converse(voice: Voice, start: list[Message], sampling: Sampling) -> None:
    """Question and answer until an empty line; a question that cannot be answered is forgotten."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its editing and history
    tell(f"{voice.name}: {HINT}")
    messages = list(start)
    while question := _ask():
        if question == "/reset":
            messages = list(start)
            tell("forgotten")
            continue
        asked: list[Message] = [*messages, {"role": "user", "content": question}]
        answer = Answer()
        try:
            show(voice.say(asked, sampling, answer))
        except UpweightError as error:
            tell(f"error: {error} (/reset begins anew)")
            continue
        if answer.finish_reason == "length":
            tell("(cut off: --max-tokens or the model's context is used up)")
        print(flush=True)
        messages = [*asked, {"role": "assistant", "content": answer.text}]


def show(pieces: Iterable[str]) -> None:
    """Pieces as they come, and a line's end."""
    on_terminal = sys.stdout.isatty()
    try:
        for piece in pieces:
            print(piece.translate(_CONTROLS) if on_terminal else piece, end="", flush=True)
    finally:
        print(flush=True)


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""
