"""Answers that follow a grammar: which tokens may come next, by llguidance over the bytes of our tokenizer's tokens.

Invariants:
* An end id may be drawn exactly where the grammar is complete; where nothing may follow, end ids are all that may be drawn.
* A compiled grammar is shared and never changes: each answer walks a copy of its own.
* What cannot be compiled is a `RequestError` before anything is queued.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import llguidance

from upweight.errors import EngineError, RequestError
from upweight.inference.types import TokenConstraint
from upweight.tokenizer import Tokenizer

# Space between the parts of JSON. Bounded: a model that likes line ends must not fill its whole answer with them.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,24}"
_SPECIAL = b"\xff"  # what llguidance marks a token with that no text can spell

MakeConstraint = Callable[[], TokenConstraint]


class GrammarError(EngineError):
    """A grammar that compiled cannot be followed any further; its answer ends with this error."""


class Grammars:
    """Compiles grammars for one vocabulary. Safe to use from several threads; its tables are built on first use."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: rows of the model's output layer, which may have more than the tokenizer has tokens."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._building = threading.Lock()
        self._tables: llguidance.LLTokenizer | None = None

    def json_schema(self, schema: dict[str, Any] | bool, *, field: str) -> MakeConstraint:
        """JSON that `schema` allows. Raises `RequestError` naming `field` for a schema that cannot be compiled."""
        return self._compile(_json_grammar(schema, field), field)

    def grammar(self, lark: str, *, field: str) -> MakeConstraint:
        """Text of a grammar in llguidance's Lark dialect, `%json` blocks included."""
        return self._compile(llguidance.LLMatcher.grammar_from_lark(lark), field)

    def _compile(self, grammar: str, field: str) -> MakeConstraint:
        matcher = llguidance.LLMatcher(self.tables(), grammar, log_level=0)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # some grammars fail only when they are walked
        if first.is_error():
            raise RequestError(f"{field} cannot be used for constrained decoding: {_why(first)}", field=field)
        return lambda: _Walk(matcher.deep_copy(), -(-self._vocab_size // 8))

    def tables(self) -> llguidance.LLTokenizer:
        with self._building:
            if self._tables is None:
                vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
                ends = [i for i in self._tokenizer.eos_ids if i < self._vocab_size]
                self._tables = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(vocabulary), eos_token=ends or [vocabulary.eos_token_id]
                )
            return self._tables


class _Walk:
    """One answer's way through a grammar; a `TokenConstraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes

    def allowed(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask[: self._mask_bytes].ljust(self._mask_bytes, b"\0")

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar became too complex or was left: {_why(self._matcher)}")


class _Vocabulary:
    """Our tokenizer in the form that llguidance reads: bytes of each token, special ones marked."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        if not tokenizer.eos_ids:
            raise RequestError(
                "this model names no end token: constrained decoding cannot end", field="response_format"
            )
        special = tokenizer.special_ids | set(tokenizer.eos_ids)
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(i for i in special if i < vocab_size)
        self.tokens: Sequence[bytes] = [
            _SPECIAL + (tokenizer.token_text(i) or "").encode() if i in special else tokenizer.token_bytes(i)
            for i in range(vocab_size)
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._encode(text, special=False)


def _why(matcher: llguidance.LLMatcher) -> str:
    """One line of what llguidance says."""
    lines = matcher.get_error().partition("<state>")[0].split()
    return " ".join(lines)[:300]


def _json_grammar(schema: dict[str, Any] | bool, field: str) -> str:
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is no JSON schema: {error}", field=field) from error
