"""Builds a tokenizer from the metadata of a GGUF file.

A GGUF file names its pre-tokenizer (how text is split before merges apply) instead of describing it. A name that is not
in the table below is refused: a wrong split gives ids that look right and are not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from upweight.errors import ModelError, UnsupportedModel
from upweight.tokenizer.gguf_header import read_header
from upweight.tokenizer.gguf_sentencepiece import sentencepiece_core
from upweight.tokenizer.parts import TokenizerParts, unique_ids

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# Pieces of the split expressions that the published models state in their own tokenizer files.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(expression: str) -> pre_tokenizers.PreTokenizer:
    pieces = pre_tokenizers.Split(Regex(expression), "isolated")
    return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Digits are split off first and the GPT-2 expression sees each piece alone, so it can't be one expression."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split("|".join([_CONTRACTIONS, _WORDS, r"\p{N}", _REST]))


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split("|".join([_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _REST]))


@dataclass(frozen=True)
class _Style:
    """How text is prepared before merges apply."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    compose: bool = False  # Unicode NFC first
    whole_words_first: bool = False  # a piece that is itself a token is taken without merging


_STYLES = {
    "gpt-2": _Style(_byte_level),
    "smollm": _Style(_smollm),
    "qwen2": _Style(_qwen2, compose=True),
    "llama-bpe": _Style(_llama3, whole_words_first=True),
}


def load_gguf(path: str | Path) -> TokenizerParts:
    """The tokenizer inside the GGUF file at `path`; `UnsupportedModel` when its kind is not known."""
    entries = read_header(path).metadata
    tokens, core = _read_core(entries, path)
    ids = {
        name: _known_id(entries, name, len(tokens), path) for name in ("bos", "eos", "eot", "eom", "padding", "unknown")
    }
    eos_ids = unique_ids((ids["eos"], ids["eot"], ids["eom"]))
    pad_id = next(iter(unique_ids((ids["padding"], *eos_ids))), 0)
    named = {"bos_token": ids["bos"], "eos_token": ids["eos"], "pad_token": pad_id, "unk_token": ids["unknown"]}
    return TokenizerParts(
        core=core,
        eos_ids=eos_ids,
        pad_id=pad_id,
        chat_template=entries.get("tokenizer.chat_template"),
        tool_template=entries.get("tokenizer.chat_template.tool_use"),
        named_tokens={name: tokens[token_id] for name, token_id in named.items() if token_id is not None},
        config=_config(entries),
    )


def _read_core(entries: dict[str, Any], path: str | Path) -> tuple[list[str], Tokenizer]:
    if entries.get("tokenizer.ggml.model") == "llama":
        return _required(entries, "tokenizer.ggml.tokens", path), sentencepiece_core(entries, path)
    style = _style(entries, path)
    tokens: list[str] = _required(entries, "tokenizer.ggml.tokens", path)
    core = _core(tokens, _required(entries, "tokenizer.ggml.merges", path), style)
    _add_special_tokens(core, tokens, entries.get("tokenizer.ggml.token_type", []))
    return tokens, core


def _style(entries: dict[str, Any], path: str | Path) -> _Style:
    model, name = entries.get("tokenizer.ggml.model"), entries.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise UnsupportedModel(
            f"tokenizer.ggml.model is {model!r} in {path}: byte-level BPE ('gpt2') and SentencePiece ('llama') are read"
        )
    if name not in _STYLES:
        raise UnsupportedModel(f"tokenizer.ggml.pre is {name!r} in {path}: known are {', '.join(sorted(_STYLES))}")
    return _STYLES[name]


def _core(tokens: list[str], merges: list[str], style: _Style) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    core = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=style.whole_words_first))
    if style.compose:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = style.pre_tokenizer()
    core.decoder = decoders.ByteLevel()
    return core


def _add_special_tokens(core: Tokenizer, tokens: list[str], types: list[int]) -> None:
    added = {
        kind: [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=False) if k == kind]
        for kind in (_CONTROL, _USER_DEFINED)
    }
    core.add_special_tokens(added[_CONTROL])
    core.add_tokens(added[_USER_DEFINED])


def _required(entries: dict[str, Any], name: str, path: str | Path) -> Any:
    if name not in entries:
        raise UnsupportedModel(f"{path} has no {name}: it holds no tokenizer that can be read")
    return entries[name]


def _known_id(entries: dict[str, Any], name: str, size: int, path: str | Path) -> int | None:
    token_id = entries.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is not None and not 0 <= token_id < size:
        raise ModelError(
            f"tokenizer.ggml.{name}_token_id is {token_id} in {path}, but the vocabulary has {size} tokens"
        )
    return token_id


def _config(entries: dict[str, Any]) -> dict[str, Any]:
    architecture = entries.get("general.architecture")
    length = entries.get(f"{architecture}.context_length")
    return {"add_bos_token": False, "add_prefix_space": False} | ({"model_max_length": length} if length else {})
