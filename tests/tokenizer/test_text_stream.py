from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_makers import byte_fallback_tokenizer

from upweight.tokenizer import TextStream, Tokenizer

FALLBACK = byte_fallback_tokenizer()


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_stream_equals_decode_for_any_ids(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stream_equals_decode_for_broken_characters(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Only tokens with bytes above 0x7F: most sequences are no UTF-8."""
    high = [i for i in range(17, 2000) if max(tokenizer.token_bytes(i)) > 0x7F]
    ids = data.draw(st.lists(st.sampled_from(high), max_size=20))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_text_arrives_in_order_and_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, special=False)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_an_emoji_comes_in_one_piece(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦜b")
    got = pieces(tokenizer, ids)
    assert "".join(got) == "a🦜b"
    assert "🦜" in got
    assert not any("\ufffd" in piece for piece in got)


def test_flush_gives_the_unfinished_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦜")[:-1]
    assert pieces(tokenizer, ids)[-1] == tokenizer.decode(ids) == "\ufffd"


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, FALLBACK.vocab_size - 1), max_size=12), skip=st.booleans())
def test_byte_fallback_stream_equals_decode(ids: list[int], skip: bool) -> None:
    assert "".join(pieces(FALLBACK, ids, skip=skip)) == FALLBACK.decode(ids, skip_special_tokens=skip)


def test_byte_fallback_holds_a_run_of_bytes() -> None:
    ids = [FALLBACK.encode("é")[-2], FALLBACK.encode("é")[-1]]
    assert pieces(FALLBACK, [*ids, *FALLBACK.encode("a")[-1:]])[:2] == ["", ""]
    assert FALLBACK.token_bytes(ids[0]) == b"\xc3"
