"""The bytes behind each token.

Two families are known. Byte-level tokens spell each byte as one printable character (a table of 256). Byte-fallback
tokens (from SentencePiece) are text with ▁ for a space, and `<0xE2>` for a byte that no token has.
"""

import json
import re
from enum import Enum
from typing import Any

import tokenizers

from upweight.errors import UnsupportedModel

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TokenSpelling(Enum):
    """How the tokens of a vocabulary spell bytes."""

    BYTE_LEVEL = "byte-level"
    BYTE_FALLBACK = "byte-fallback"


def spelling_of(core: tokenizers.Tokenizer) -> TokenSpelling:
    """The spelling that the tokenizer's decoder stands for; `UnsupportedModel` for others (WordPiece, CTC, …)."""
    kinds = _decoder_kinds(json.loads(core.decoder.__getstate__()) if core.decoder else None)
    if kinds == {"ByteLevel"}:
        return TokenSpelling.BYTE_LEVEL
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return TokenSpelling.BYTE_FALLBACK
    raise UnsupportedModel(f"the tokenizer's decoder is {sorted(kinds)}: only byte-level and byte-fallback are known")


def byte_of_fallback(token: str) -> int | None:
    """The byte that a token such as `<0xE2>` stands for, None for any other token."""
    match = _FALLBACK.match(token)
    return int(match[1], 16) if match else None


def bytes_of(token: str, spelling: TokenSpelling) -> bytes:
    """The bytes that `token` adds to a text (byte-fallback: a leading space is kept)."""
    if spelling is TokenSpelling.BYTE_FALLBACK:
        byte = byte_of_fallback(token)
        return token.replace("▁", " ").encode() if byte is None else bytes([byte])
    # An added token is spelled as it is read; one with a character outside the table can only be such.
    if any(char not in _BYTE_OF for char in token):
        return token.encode()
    return bytes(_BYTE_OF[char] for char in token)


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_decoder_kinds(part) for part in decoder["decoders"]))
    return {decoder["type"]}


def _byte_table() -> dict[str, int]:
    """Printable Latin-1 characters stand for their own byte, the other bytes for U+0100, U+0101, … in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_table()
