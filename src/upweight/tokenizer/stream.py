"""Ids → text while the ids still come.

Invariants
- What `push` and `flush` returned, joined, is what `Tokenizer.decode` gives for all pushed ids at once.
- Returned text never changes: a character is held back until all its bytes are there.
"""

import codecs
from typing import TYPE_CHECKING

from upweight.tokenizer.token_bytes import TokenSpelling, byte_of_fallback

if TYPE_CHECKING:
    from upweight.tokenizer.tokenizer import Tokenizer


class TextStream:
    """Decodes one answer token by token; not for use by two threads at once."""

    def __init__(self, tokenizer: "Tokenizer", *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        fallback = tokenizer.spelling is TokenSpelling.BYTE_FALLBACK
        self._decoder: _Decoder = _FallbackDecoder(tokenizer) if fallback else _ByteDecoder(tokenizer)

    def push(self, token_id: int) -> str:
        """The text that became final with this token, often empty."""
        return "" if token_id in self._skipped else self._decoder.push(token_id)

    def pending(self) -> str:
        """The text of the tokens held back if they spell whole characters so far, else empty. It may still change."""
        return self._decoder.pending()

    def flush(self) -> str:
        """The rest: bytes of an unfinished character become U+FFFD. Ends the stream."""
        return self._decoder.flush()


class _ByteDecoder:
    """Byte-level tokens: the text is the UTF-8 of their bytes, one after the other."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def pending(self) -> str:
        return ""  # only bytes of an unfinished character are held

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _FallbackDecoder:
    """Byte-fallback tokens: a run of byte tokens is valid as a whole or not at all, so it is held until it ends.

    The space before the first word is dropped by some decoders, only at the very beginning. Every later piece is
    therefore decoded behind one settled token, whose own text is cut off again.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._settled: list[int] = []  # the last token whose text was returned
        self._held: list[int] = []  # byte tokens whose run goes on

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        piece = self._tokenizer.token_text(token_id)
        return "" if piece is None or byte_of_fallback(piece) is not None else self.flush()

    def pending(self) -> str:
        try:
            text = b"".join(self._tokenizer.token_bytes(token_id) for token_id in self._held).decode()
        except UnicodeDecodeError:
            return ""
        # At the very beginning the decoder may drop a space.
        return self._decode(self._held) if text.startswith(" ") and not self._settled else text

    def flush(self) -> str:
        if not self._held:
            return ""
        text = self._decode([*self._settled, *self._held])[len(self._decode(self._settled)) :]
        self._settled, self._held = self._held[-1:], []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


_Decoder = _ByteDecoder | _FallbackDecoder
