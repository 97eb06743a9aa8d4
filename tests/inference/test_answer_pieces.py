"""Which tokens a piece of text covers: all that spell it, none whose text is still held back."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from upweight.inference.answer import AnswerText
from upweight.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[1] / "data" / "smollm2")


def pieces(ids: list[int], stop: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    answer, found = AnswerText(TOKENIZER, stop), []
    for token in ids:
        answer.push(token)
        if answer.stopped:
            break
        found.append(answer.fresh())
    answer.flush()
    return [*found, answer.fresh(last=True)]


def test_a_character_of_several_tokens_comes_with_all_of_them() -> None:
    ids = TOKENIZER.encode("a\U0001fae8b")
    assert len(ids) > 4  # the face is spelled by more than two tokens
    told = [one for one in pieces(ids) if one[0]]
    assert told == [("a", 1), ("\U0001fae8", len(ids) - 1), ("b", len(ids))]


def test_what_may_begin_a_stop_string_is_held_back_with_its_tokens() -> None:
    ids = [TOKENIZER.encode(letter)[0] for letter in "abcabd"]
    assert pieces(ids, ("abd",)) == [("", 0), ("", 0), ("abc", 3), ("", 3), ("", 3), ("", 6)]
    assert pieces(ids[:5], ("abd",)) == [("", 0), ("", 0), ("abc", 3), ("", 3), ("", 3), ("ab", 5)]


def test_a_token_of_which_a_part_is_held_back_comes_later() -> None:
    ids = [*TOKENIZER.encode(" there"), *TOKENIZER.encode("!")]
    assert pieces(ids, ("re?",)) == [(" the", 0), ("re!", 2), ("", 2)]


@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=12),
    st.lists(st.text("ab \u00e9", min_size=1, max_size=3), max_size=2),
)
def test_pieces_never_cover_tokens_whose_text_is_not_out(ids: list[int], stop: list[str]) -> None:
    told = pieces(ids, tuple(stop))
    text = ""
    for piece, tokens in told[:-1]:
        text += piece
        assert text.startswith(TOKENIZER.decode(ids[:tokens]).rstrip("\ufffd"))
    counts = [tokens for _, tokens in told]
    assert counts == sorted(counts)
