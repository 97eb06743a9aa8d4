"""The text of an answer while its tokens arrive: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from upweight.tokenizer import TextStream, Tokenizer


class AnswerText:
    """`push` each token; `stopped` tells whether a stop string is complete. The text ends before the match."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._stop = tuple(s for s in stop if s)
        self._text = ""
        self._given = 0
        self.stopped = False

    @property
    def text(self) -> str:
        return self._text

    def push(self, token_id: int) -> None:
        self._extend(self._stream.push(token_id))

    def flush(self) -> None:
        """No token follows: incomplete characters become visible."""
        if not self.stopped:
            self._extend(self._stream.flush())

    def fresh(self, *, last: bool = False) -> str:
        """Text since the last call that can no longer change; a possible beginning of a stop string is held back."""
        end = len(self._text) if last or self.stopped else len(self._text) - self._held_back()
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _extend(self, piece: str) -> None:
        if not piece:
            return
        before = len(self._text)
        self._text += piece
        hits = []
        for stop in self._stop:
            at = self._text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                hits.append(at)
        if hits:
            self._text = self._text[: min(hits)]
            self.stopped = True

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
