"""Which tokens of a conversation are trained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_makers import byte_fallback_tokenizer

from upweight.errors import RequestError
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.answers import Marked, mark_answers
from upweight.tokenizer.parts import TokenizerParts


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def trained_texts(tokenizer: Tokenizer, sequence: Marked) -> list[str]:
    """The runs of trained tokens, as text with special tokens."""
    runs, run = [], []
    for token, trained in zip([*sequence.ids, 0], [*sequence.mask, 0], strict=True):
        if trained:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return runs


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    parts = tokenizer._parts
    return Tokenizer(
        TokenizerParts(
            core=parts.core,
            eos_ids=parts.eos_ids,
            pad_id=parts.pad_id,
            chat_template=template,
            named_tokens=parts.named_tokens,
        )
    )


def test_the_answer_and_its_end_token_are_trained_and_nothing_else(folder_tokenizer: Tokenizer) -> None:
    messages = [user("hi"), assistant("hello there"), user("and?"), assistant("bye")]
    (one,) = mark_answers(folder_tokenizer, messages, [False, True, False, True])
    assert trained_texts(folder_tokenizer, one) == ["hello there<|im_end|>", "bye<|im_end|>"]
    assert one.ids == folder_tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert one.ends
    (last,) = mark_answers(folder_tokenizer, messages, [False, False, False, True])
    assert trained_texts(folder_tokenizer, last) == ["bye<|im_end|>"]
    assert last.ids == one.ids


@settings(max_examples=30, deadline=None, derandomize=True)
@given(texts=st.lists(st.text(alphabet="ab é\n<🙂1", min_size=1, max_size=6), min_size=2, max_size=6))
def test_each_answer_follows_exactly_what_a_request_is_answered_from(
    folder_tokenizer: Tokenizer, texts: list[str]
) -> None:
    messages = [assistant(text) if i % 2 else user(text) for i, text in enumerate(texts)]
    trained = [message["role"] == "assistant" for message in messages]
    (one,) = mark_answers(folder_tokenizer, messages, trained)
    answers = [text for i, text in enumerate(texts) if i % 2]
    assert trained_texts(folder_tokenizer, one) == [f"{text}<|im_end|>" for text in answers]
    asked = folder_tokenizer.encode_chat(messages[:1], add_generation_prompt=True)
    assert one.ids[: len(asked)] == asked
    assert one.mask.index(1) == len(asked)


FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
    "<|im_start|>assistant\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_the_history_gives_each_answer_its_own_sequence(folder_tokenizer: Tokenizer) -> None:
    tokenizer = with_template(folder_tokenizer, FORGETFUL)
    messages = [user("hi"), assistant("<think>hm</think>yes"), user("sure?"), assistant("<think>so</think>very")]
    sequences = mark_answers(tokenizer, messages, [False, True, False, True])
    told = [trained_texts(tokenizer, one) for one in sequences]
    assert told == [["<think>hm</think>yes<|im_end|>"], ["<think>so</think>very<|im_end|>"]]
    asked = tokenizer.encode_chat(messages[:3], add_generation_prompt=True)
    assert sequences[1].ids[: len(asked)] == asked
    assert "hm" not in tokenizer.decode(sequences[1].ids)


def test_a_template_that_asks_with_other_words_than_it_writes_is_refused(folder_tokenizer: Tokenizer) -> None:
    asking = FORGETFUL.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    with pytest.raises(RequestError, match=r"messages\[1\]: the chat template asks for an answer with other words"):
        mark_answers(with_template(folder_tokenizer, asking), [user("hi"), assistant("yes")], [False, True])


def test_a_template_without_an_end_token_is_told(folder_tokenizer: Tokenizer) -> None:
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = with_template(folder_tokenizer, bare)
    (one,) = mark_answers(tokenizer, [user("hi"), assistant("yes")], [False, True])
    assert trained_texts(tokenizer, one) == ["yes\n"]
    assert not one.ends


def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_into_its_middle() -> None:
    instructions = "{% for m in messages %}{% if m.role == 'user' %}a {{ m.content }} b{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    tokenizer = with_template(byte_fallback_tokenizer(), instructions)
    messages = [user("ab"), assistant("ab a")]
    (one,) = mark_answers(tokenizer, messages, [False, True])
    assert one.ids == tokenizer.encode("a ab b ab a</s>")
    assert trained_texts(tokenizer, one) == ["ab a</s>"]  # the decoder drops a first space


def test_without_a_template_texts_follow_each_other(folder_tokenizer: Tokenizer) -> None:
    plain = with_template(folder_tokenizer, None)
    (one,) = mark_answers(plain, [user("2 + 2 ="), assistant(" 4")], [False, True])
    assert one.ids == [*plain.encode("2 + 2 = 4"), plain.eos_ids[0]]
    assert trained_texts(plain, one)[0].startswith(" 4")
