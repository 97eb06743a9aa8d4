"""Conversations → ids with the assistant's answers marked, as a model that is to learn them needs them.

Invariants
- What precedes a marked answer is, id for id, what a request with the messages before it is answered from.
- Marked is what the model has to write: the answer up to and with the token that ends its turn; never the line break after it,
  the generation prompt, or anything of another role.
- A template that writes the history otherwise than it wrote it before is noticed: the conversation then falls into one sequence
  for each answer, each after the history as the template writes it at that point.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upweight.errors import RequestError
from upweight.tokenizer.chat import Message
from upweight.tokenizer.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(kw_only=True)
class Marked:
    """One sequence: `mask` is 1 on what is trained."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    text: str = ""
    ends: bool = True  # each answer ends with a token that ends a turn

    def add(self, ids: Sequence[int], trained: int) -> None:
        self.ids += ids
        self.mask += [trained] * len(ids)


def mark_answers(
    tokenizer: Tokenizer, messages: Sequence[Message], trained: Sequence[bool], tools: Tools = None
) -> list[Marked]:
    """One sequence, or several where the template rewrites the history. `trained` holds for messages of the assistant only.

    `RequestError` (field "messages") when the template refuses, or writes an answer otherwise than it asks for one.
    """
    if tokenizer.chat_template is None:
        return [_plain(tokenizer, messages, trained)]
    turns = [_turn(tokenizer, messages, index, tools) for index, wanted in enumerate(trained) if wanted]
    sequences = [Marked()]
    for prompt, answer in turns:
        if not prompt.startswith(sequences[-1].text):
            sequences.append(Marked())
        _append(tokenizer, sequences[-1], prompt, answer)
    return sequences


def _turn(tokenizer: Tokenizer, messages: Sequence[Message], index: int, tools: Tools) -> tuple[str, str]:
    """What the model is asked with, and what it has to write, as texts."""
    options: dict[str, Any] = {"tools": tools, "keep_calls": True}
    prompt = tokenizer.render(messages[:index], add_generation_prompt=True, **options)
    whole = tokenizer.render(messages[: index + 1], add_generation_prompt=False, **options)
    if not whole.startswith(prompt):
        raise RequestError(
            f"messages[{index}]: the chat template asks for an answer with other words than it writes one with, so the trained"
            " part cannot be told apart",
            field="messages",
        )
    return prompt, whole[len(prompt) :]


def _append(tokenizer: Tokenizer, sequence: Marked, prompt: str, answer: str) -> None:
    before = sequence.text
    sequence.add(_continued(tokenizer, sequence.ids, before, prompt[len(before) :]), 0)
    ids = _continued(tokenizer, sequence.ids, prompt, answer)
    last = max((place for place, token in enumerate(ids) if token in tokenizer.eos_ids), default=None)
    sequence.ends &= last is not None
    end = len(ids) if last is None else last + 1
    sequence.add(ids[:end], 1)
    sequence.add(ids[end:], 0)
    sequence.text = prompt + answer


def _continued(tokenizer: Tokenizer, ids: Sequence[int], text: str, more: str) -> list[int]:
    """Ids of `more` behind `text`, whose ids stay what they are: a model that wrote them cannot take them back."""
    last_ids, last = _since_special(tokenizer, ids, text)
    whole = tokenizer.encode(last + more)
    return whole[len(last_ids) :] if whole[: len(last_ids)] == list(last_ids) else tokenizer.encode(more)


def _since_special(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> tuple[Sequence[int], str]:
    """The end of a text from its last special token on: nothing before it has a say in what follows."""
    for place in reversed(range(len(ids))):
        if ids[place] in tokenizer.special_ids:
            token = tokenizer.token_text(ids[place])
            at = text.rfind(token) if token else -1
            return (ids[place:], text[at:]) if at >= 0 else (ids, text)
    return ids, text


def _plain(tokenizer: Tokenizer, messages: Sequence[Message], trained: Sequence[bool]) -> Marked:
    """For a model without a chat template: the texts one after the other, an end token behind each answer."""
    sequence = Marked()
    for message, wanted in zip(messages, trained, strict=True):
        more = str(message["content"])
        ids = _continued(tokenizer, sequence.ids, sequence.text, more)
        sequence.text += more
        sequence.add([*ids, *tokenizer.eos_ids[:1]] if wanted else ids, int(wanted))
    sequence.ends = bool(tokenizer.eos_ids)
    return sequence
