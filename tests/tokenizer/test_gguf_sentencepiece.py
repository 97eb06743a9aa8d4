"""Vocabularies with scores against SentencePiece's own rule, written out step by step."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf_makers import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from upweight.errors import UnsupportedModel
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.gguf_sentencepiece import sentencepiece_core

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = ["▁", "a", "b", "c"]


def entries_of(words: list[str], prefix: bool = True) -> dict[str, Any]:
    """Earlier words have better scores, single letters the worst, as trained vocabularies have it."""
    tokens = [*SPECIAL, *BYTES, *words, *LETTERS]
    scores = [0.0] * (len(SPECIAL) + 256) + [-float(rank) for rank in range(len(words) + len(LETTERS))]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(LETTERS)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def by_the_rule(text: str, entries: dict[str, Any]) -> list[str]:
    """Joins the neighbours whose concatenation has the best score, the leftmost of equals, until none is left."""
    scores = dict(zip(entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.scores"], strict=True))
    parts = list(text)
    while True:
        joins = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joins:
            break
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        piece for part in parts for piece in ([part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()])
    ]


WORDS = st.lists(st.text("▁abc", min_size=2, max_size=4), max_size=12, unique=True)


@settings(max_examples=200, deadline=None)
@given(words=WORDS, text=st.text(" abcé", max_size=14))
def test_tokens_are_those_of_the_rule(words: list[str], text: str) -> None:
    entries = entries_of(words, prefix=False)
    found = sentencepiece_core(entries, "m.gguf").encode(text).tokens
    assert found == by_the_rule(text.replace(" ", "▁"), entries)


def test_a_file(tmp_path: Path) -> None:
    entries = entries_of(["▁a", "ab", "▁ab", "bc"]) | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"
    }
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", entries))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ab bc</s>")] == ["▁ab", "▁", "bc", "</s>"]
    assert tokenizer.decode(tokenizer.encode("ab é bc")) == "ab é bc"
    assert (tokenizer.eos_ids, tokenizer.special_ids) == ((2,), {1, 2})
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}])[:1] == [1]
    assert tokenizer.token_bytes(tokenizer.encode("é")[-1]) == "é".encode()[-1:]


def test_tokens_of_the_user_go_first(tmp_path: Path) -> None:
    entries = entries_of(["▁▁", "\n\n", "ab"], prefix=False)
    types = entries["tokenizer.ggml.token_type"]
    for word in ("▁▁", "\n\n"):
        types[entries["tokenizer.ggml.tokens"].index(word)] = 4
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", entries))
    tokens = [tokenizer.token_text(i) for i in tokenizer.encode("ab  c\n\na")]
    assert tokens == ["ab", "▁▁", "c", "\n\n", "a"]
    assert tokenizer.decode(tokenizer.encode("ab  c\n\na")) == "ab  c\n\na"


def test_vocabularies_that_cannot_be_read() -> None:
    entries = entries_of(["ab"])
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.ggml\.scores for each token"):
        sentencepiece_core({**entries, "tokenizer.ggml.scores": [0.0]}, "m.gguf")
    tokens = ["x" if token == "<0x0A>" else token for token in entries["tokenizer.ggml.tokens"]]
    with pytest.raises(UnsupportedModel, match="has no token <0x0A>"):
        sentencepiece_core({**entries, "tokenizer.ggml.tokens": tokens}, "m.gguf")
