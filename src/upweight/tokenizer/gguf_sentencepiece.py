"""A SentencePiece vocabulary (`tokenizer.ggml.model` = llama, as Gemma and Mistral files have it) → a BPE core.

SentencePiece joins, of all neighbours whose concatenation is a token, those with the best score first, the leftmost of equals.
That is byte-pair encoding with every way to split a token as a merge, in falling order of the token's score.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from upweight.errors import UnsupportedModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type


def sentencepiece_core(entries: Mapping[str, Any], path: object) -> Tokenizer:
    """`UnsupportedModel` when scores or types are missing, or when some byte has no token."""
    tokens, scores, types = (_list(entries, name, path) for name in ("tokens", "scores", "token_type"))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if missing := [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocab]:
        raise UnsupportedModel(f"{path} has no token <0x{missing[0]:02X}>: only vocabularies with all bytes are read")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = list(_merges(tokens, scores, types, vocab))
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = bool(entries.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    kinds = list(zip(tokens, types, strict=True))
    core.add_special_tokens([AddedToken(t, normalized=False) for t, kind in kinds if kind == _CONTROL])
    # One that is spelled with ▁ is looked for in text whose spaces are spelled so already.
    core.add_tokens([AddedToken(t, normalized="▁" in t) for t, kind in kinds if kind == _USER_DEFINED])
    return core


def _merges(
    tokens: list[str], scores: list[float], types: list[int], vocab: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    for token_id in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        token = tokens[token_id]
        if types[token_id] != _NORMAL:
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                yield left, right


def _list(entries: Mapping[str, Any], name: str, path: object) -> list[Any]:
    found = entries.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or len(found) != len(entries.get("tokenizer.ggml.tokens", ())):
        raise UnsupportedModel(
            f"{path} has no tokenizer.ggml.{name} for each token: it holds no tokenizer that can be read"
        )
    return found
