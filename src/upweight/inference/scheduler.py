"""Which rows run in the next step (plain Python: no array library).

A row's tokens are prompt + output. Keys and values exist for the first `computed` of them. Prefill computes all but the last
token; the last one always goes through a decode step, which also draws the next. So prefill never needs logits, and a prompt
that is already known joins the decode batch at once.

Invariants:
* A row decodes in every step from its first one to its last, unless it is preempted for want of pages.
* While at least as many rows decode as wait, a step prefills at most `busy_prefill` tokens, so that a long prompt stalls nobody.
* While a row decodes whose text is streamed, a step prefills at most one piece of `beside_tokens`, which its decode call computes
  along: whoever reads along sees no gap of two steps, however many prompts wait. The piece's row decodes from the next step.
* Rows are admitted in order of arrival. A preempted row keeps its tokens and is admitted again before newer ones.
* A prefix becomes known in the step that computes it, so rows admitted later in the same step share it.
* Nothing computed under one weights version becomes a known prefix of another, unless `keep_prefixes` asks for it.
* While draining, only rows that have begun are admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from upweight.inference.pages import PagePool, PrefixTree
from upweight.inference.types import Request, TokenConstraint

LEAST_PIECE = (
    16  # fewer tokens of a longer prompt are not begun in what other pieces leave of a step: they cost as much as these
)


def beside_tokens(rows: int) -> int:
    """Tokens of a prompt that a step of so many rows may compute along: it takes less than two steps without (1.8 and 1.6, measured)."""
    return 24 if rows <= 2 else 32


@dataclass(eq=False, kw_only=True)
class Row:
    """One running request."""

    request: Request
    tokens: list[int]
    limit: int  # most tokens that prompt + output may reach
    seed: int
    stop_ids: frozenset[int] = frozenset()  # ids that end it, barred until `min_tokens` are there
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    epoch: int = 0  # the weights that all its keys and values so far were computed with; −1 = several
    cached_tokens: int = 0
    cached_version: int | None = None  # oldest weights version of the known prefix it started from
    restarts: int = 0  # times its keys and values were given up
    constraint: TokenConstraint | None = None  # which tokens may come next
    allowed: bytes | None = None  # its mask for the next draw

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def only_scored(self) -> bool:
        """Whether the row ends with its prompt."""
        return self.request.params.max_tokens == 0

    @property
    def missing(self) -> int:
        """Tokens to prefill before the row can decode."""
        return len(self.tokens) - 1 - self.computed


@dataclass(frozen=True)
class PrefillPiece:
    row: Row
    start: int  # first token of the piece
    count: int


@dataclass(frozen=True)
class StepPlan:
    prefill: list[PrefillPiece]  # before the decode call
    decode: list[Row]
    beside: PrefillPiece | None = None  # by the decode call; of a row that does not decode yet

    @property
    def empty(self) -> bool:
        return not self.prefill and not self.decode


class Scheduler:
    """Admission, prefill budget, pages and preemption of up to `max_rows` rows."""

    def __init__(
        self,
        *,
        max_rows: int,
        num_pages: int,
        prefill_budget: int = 512,
        busy_prefill: int = 64,
        keep_prefixes: bool = False,
    ) -> None:
        self.max_rows = max_rows
        self.busy_prefill = min(busy_prefill, prefill_budget)
        self.keep_prefixes = keep_prefixes
        self.draining = False
        self.prefill_budget = prefill_budget
        self.pool = PagePool(num_pages)
        self.prefixes = PrefixTree(self.pool)
        self.version = 0
        self.epoch = 0  # counts changes of weights: a version number may come twice
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.preemptions = 0
        self.prefilled_tokens = 0

    @property
    def capacity(self) -> int:
        """Most tokens that one row can ever have pages for."""
        return self.pool.num_pages - 1

    @property
    def interrupted(self) -> bool:
        """Whether a row that had begun waits to go on."""
        return any(row.restarts for row in self.waiting)

    def add(self, row: Row) -> None:
        self.waiting.append(row)

    def plan(self) -> StepPlan:
        """The next step; what it says is taken as done by the calls that follow.

        Rows that decode get their pages first, so that nothing planned here is ever preempted here.
        """
        decode = self._plan_decode()
        watched = any(row.request.on_text is not None for row in decode)
        pieces = self._plan_pieces(self._budget(decode, watched), most=1 if watched else None)
        if watched and pieces:
            along = not pieces[0].row.request.params.prompt_logprobs  # scores need a call of their own
            return StepPlan([], decode, pieces[0]) if along else StepPlan(pieces, decode)
        chosen = set(map(id, decode))
        for row in self.running:
            if not row.missing and not row.only_scored and id(row) not in chosen and self._has_page():
                row.pages.append(self.pool.take())
                decode.append(row)
        return StepPlan(pieces, decode)

    def _budget(self, decode: Sequence[Row], watched: bool) -> int:
        """Most tokens that the step prefills."""
        if watched:
            return min(beside_tokens(len(decode)), self.prefill_budget)
        return self.busy_prefill if decode and len(decode) >= len(self.waiting) else self.prefill_budget

    def _plan_pieces(self, budget: int, most: int | None) -> list[PrefillPiece]:
        """Of rows that run, then of those admitted for it; at most `most` pieces."""
        pieces: list[PrefillPiece] = []
        for row in self.running:
            if len(pieces) != most:
                budget -= self._plan_prefill(row, budget, pieces)
        while self.waiting and len(self.running) < self.max_rows and budget > 0 and len(pieces) != most:
            if self.draining and not self.waiting[0].restarts:
                break
            if not self._admit(self.waiting[0]):
                break
            row = self.waiting.popleft()
            self.running.append(row)
            planned = self._plan_prefill(row, budget, pieces)
            if row.missing and not planned:
                break
            budget -= planned
        return pieces

    def advance(self, row: Row, token: int) -> None:
        """The row's last token was computed and the next one drawn."""
        row.computed += 1
        if row.epoch != self.epoch:
            row.epoch = -1
        row.tokens.append(token)

    def finish(self, row: Row) -> None:
        """Takes the row out (running or waiting); what it computed stays known while pages last."""
        if row in self.running:
            self.running.remove(row)
            self._remember(row)
        else:
            self.waiting.remove(row)
        self._release(row)

    def set_version(self, version: int) -> None:
        """The next step uses other weights; running rows go on over the keys and values they have."""
        self.version = version
        self.epoch += 1
        if not self.keep_prefixes:
            self.prefixes.clear()
        for row in reversed(self.running.copy()):
            if row.missing and row.request.params.prompt_logprobs:  # its scores must be of one set of weights
                self._give_up(row)

    def forget(self) -> None:
        """Nothing that was computed counts any more."""
        self.prefixes.clear()

    def restart_running(self) -> None:
        """Keys and values of running rows are computed again before they go on."""
        for row in reversed(self.running.copy()):
            self._give_up(row)

    def _admit(self, row: Row) -> bool:
        known, oldest = self._known(row)
        need = len(row.tokens) - len(known)
        self.prefixes.evict(need)
        if self.pool.num_free < need and self.running:
            for page in known:
                self.pool.release(page)
            return False
        row.pages = known
        row.computed = len(known)
        if not row.restarts:  # what it computes twice is no hit
            row.cached_tokens, row.cached_version = len(known), oldest
        row.epoch = self.epoch
        return True

    def _known(self, row: Row) -> tuple[list[int], int | None]:
        """What need not be computed; a row whose prompt is scored computes all of it."""
        return ([], None) if row.request.params.prompt_logprobs else self.prefixes.match(row.tokens[:-1])

    def _plan_prefill(self, row: Row, budget: int, pieces: list[PrefillPiece]) -> int:
        count = min(row.missing, budget)
        if count <= 0 or (pieces and count < min(row.missing, LEAST_PIECE)):
            return 0
        self.prefixes.evict(count)
        count = min(count, self.pool.num_free)
        if count == 0:
            return 0
        pieces.append(PrefillPiece(row, row.computed, count))
        row.pages.extend(self.pool.take() for _ in range(count))
        row.computed += count
        self.prefilled_tokens += count
        if row.epoch != self.epoch:
            row.epoch = -1
        self._remember(row)
        return count

    def _has_page(self) -> bool:
        self.prefixes.evict(1)
        return self.pool.num_free > 0

    def _plan_decode(self) -> list[Row]:
        """Every row that is ready, oldest first; the youngest rows make room when pages run out."""
        ready: list[Row] = []
        for row in list(self.running):
            if row.missing or row.only_scored or row not in self.running:
                continue
            while row in self.running and not self._has_page():
                self._preempt(self.running[-1])
            if row in self.running:
                row.pages.append(self.pool.take())
                ready.append(row)
        return ready

    def _preempt(self, row: Row) -> None:
        """Makes room: the row goes on later with the tokens it has."""
        self._give_up(row)
        self.preemptions += 1

    def _give_up(self, row: Row) -> None:
        """Gives the row's pages back; it is the next to be admitted."""
        self.running.remove(row)
        self._release(row)
        row.computed = 0
        row.restarts += 1
        self.waiting.appendleft(row)

    def _remember(self, row: Row) -> None:
        if row.computed and (row.epoch == self.epoch or self.keep_prefixes):
            self.prefixes.insert(row.tokens[: row.computed], row.pages[: row.computed], self.version)

    def _release(self, row: Row) -> None:
        for page in row.pages:
            self.pool.release(page)
        row.pages = []
