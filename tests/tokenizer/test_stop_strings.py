"""Stop strings over both kinds of tokenizers: what ends an answer, and with which token, whatever its tokens are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_makers import byte_fallback_tokenizer

from upweight.inference.answer import AnswerText
from upweight.tokenizer import Tokenizer

FALLBACK = byte_fallback_tokenizer()


def byte_ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


A, B, AB = 260, 261, 263


def test_the_tokens_by_name() -> None:
    assert [FALLBACK.token_text(i) for i in (A, B, AB, *byte_ids("\n"))] == ["a", "b", "ab", "<0x0A>"]


def told(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...]) -> tuple[list[str], str, int, bool]:
    """(pieces of text, text, tokens pushed, stopped) of an answer that ends where a stop string is complete."""
    answer, streamed, used = AnswerText(tokenizer, stop), [], 0
    for token in ids:
        answer.push(token)
        used += 1
        if answer.stopped:
            break
        streamed.append(answer.fresh()[0])
    answer.flush()
    streamed.append(answer.fresh(last=True)[0])
    return streamed, answer.text, used, answer.stopped


@pytest.mark.parametrize("stop", ["\n", "b\n", "\n\n"])
def test_a_stop_string_of_byte_tokens_is_found_with_its_last_token(stop: str) -> None:
    ids = [A, B, *byte_ids("\n\n"), A]
    _, text, used, stopped = told(FALLBACK, ids, (stop,))
    assert (text, stopped) == ("ab\n\na"[: "ab\n\na".index(stop)], True)
    assert used == "ab\n\na".index(stop) + len(stop)


def test_a_stop_string_at_the_very_end_of_a_run_of_bytes_is_no_length() -> None:
    assert told(FALLBACK, [A, *byte_ids("\n")], ("\n",))[1:] == ("a", 2, True)
    assert told(FALLBACK, byte_ids("\u00e9"), ("\u00e9",))[1:] == ("", 2, True)
    assert told(FALLBACK, byte_ids("\u00e9")[:1], ("\u00e9",))[1:] == ("\ufffd", 1, False)


@pytest.mark.parametrize("ids", [[A, B, A], [AB, A], [*byte_ids("aba")], [A, *byte_ids("b"), A]])
def test_the_stop_string_that_is_complete_first_counts(ids: list[int]) -> None:
    assert told(FALLBACK, ids, ("b", "aba"))[1] == "a"
    assert told(FALLBACK, ids, ("aba", "b"))[1] == "a"
    assert told(FALLBACK, ids, ("b", "ab"))[1] == ""  # both are complete with the same character


def test_a_token_longer_than_a_stop_string(tokenizer: Tokenizer) -> None:
    for ids in (tokenizer.encode("xabc"), [tokenizer.encode(letter)[0] for letter in "xabc"]):
        assert told(tokenizer, ids, ("b", "abc"))[1] == "xa"


def test_what_was_held_back_goes_when_it_does_match() -> None:
    streamed, text, used, stopped = told(FALLBACK, [A, A, B, *byte_ids("\n")], ("ab\n",))
    assert streamed == ["", "a", "", ""]
    assert (text, used, stopped) == ("a", 4, True)


@st.composite
def spelled(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    """A text that begins with "a", tokens that spell it, and how many characters each completes in all."""
    text = "a" + draw(st.text("ab\n \u00e9", max_size=12))
    ids, ends, at = [A], [1], 1
    while at < len(text):
        if text[at : at + 2] == "ab" and draw(st.booleans()):
            ids, ends, at = [*ids, AB], [*ends, at + 2], at + 2
        elif text[at] in "ab" and draw(st.booleans()):
            ids, ends, at = [*ids, A if text[at] == "a" else B], [*ends, at + 1], at + 1
        else:
            spelling = byte_ids(text[at])
            ids, ends, at = [*ids, *spelling], [*ends, *[at] * (len(spelling) - 1), at + 1], at + 1
    return text, ids, ends


@settings(max_examples=400, deadline=None)
@given(spelled(), st.lists(st.text("ab\n \u00e9", min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_end_depends_on_the_text_alone(made: tuple[str, list[int], list[int]], stops: list[str]) -> None:
    text, ids, ends = made
    streamed, got, used, stopped = told(FALLBACK, ids, tuple(stops))
    matches = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    assert stopped == bool(matches)
    assert "".join(streamed) == got
    if matches:
        end, start = min(matches)
        assert got == text[:start]
        assert used == next(count for count, reached in enumerate(ends, 1) if reached >= end)
    else:
        assert got == text
