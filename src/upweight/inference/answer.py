"""The text of an answer while its tokens arrive: incremental decoding and stop strings.

Invariants
- A stop string is found with the token that completes it, also where the decoder still holds that token's text back.
- Of several, the one that is complete first counts, and of those the longest: where the text ends depends on the text alone,
  not on the borders of the tokens that spell it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from upweight.tokenizer import TextStream, Tokenizer


class AnswerText:
    """`push` each token; `stopped` tells whether a stop string is complete. The text ends before the match."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._stop = tuple(s for s in stop if s)
        self._text = ""
        self._given = 0
        self._pushed = 0
        self._covered = 0
        self._spelled: deque[tuple[int, int]] = deque()  # (tokens, length of their text), not yet covered
        self.stopped = False

    @property
    def text(self) -> str:
        return self._text

    def push(self, token_id: int) -> None:
        self._pushed += 1
        piece = self._stream.push(token_id)
        if piece:  # also the text of tokens before, which spelled a part of a character only
            self._spelled.append((self._pushed, len(self._text) + len(piece)))
        self._extend(piece, self._stream.pending() if self._stop else "")

    def flush(self) -> None:
        """No token follows: incomplete characters become visible."""
        if not self.stopped:
            self._extend(self._stream.flush())

    def fresh(self, *, last: bool = False) -> tuple[str, int]:
        """(text since the last call that can no longer change, number of tokens whose whole text is given out with it).

        A possible beginning of a stop string is held back, and so are the tokens that spell it.
        """
        end = len(self._text) if last or self.stopped else len(self._text) - self._held_back()
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        while self._spelled and self._spelled[0][1] <= self._given:
            self._covered = self._spelled.popleft()[0]
        return piece, self._pushed if last else self._covered

    def _extend(self, piece: str, pending: str = "") -> None:
        before = len(self._text)
        self._text += piece
        seen = self._text + pending if pending else self._text
        if len(seen) == before:
            return
        hits = []
        for stop in self._stop:
            at = seen.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                hits.append((at + len(stop), at))
        if hits:
            self._text = seen[: min(hits)[1]]
            self.stopped = True

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
