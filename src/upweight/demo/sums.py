"""The demo's task: sums of two numbers up to 20, made here, with held-out sums that training never sees.

Tasks are split by the unordered pair: if 13 + 14 is held out, so is 14 + 13.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

LARGEST = 20
HELD_OUT_SHARE = 0.34
SYSTEM_PROMPT = "Reply with the number only."


@dataclass(frozen=True)
class SumTask:
    """What is a + b?"""

    a: int
    b: int

    @property
    def answer(self) -> int:
        return self.a + self.b

    @property
    def question(self) -> str:
        return f"What is {self.a}+{self.b}?"

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": self.question}]


@dataclass(frozen=True)
class Split:
    train: list[SumTask]
    held_out: list[SumTask]


def split_tasks(seed: int) -> Split:
    """About 265 tasks to train on and about 135 held out, disjoint also under exchange of the two numbers."""
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(a, LARGEST + 1)]
    random.Random(f"split-{seed}").shuffle(pairs)
    cut = round(len(pairs) * HELD_OUT_SHARE)
    return Split(train=_both_orders(pairs[cut:]), held_out=_both_orders(pairs[:cut]))


def _both_orders(pairs: Sequence[tuple[int, int]]) -> list[SumTask]:
    return [SumTask(a, b) for a, b in sorted({order for a, b in pairs for order in ((a, b), (b, a))})]


class SumDataset:
    """Training tasks in a seeded order, reshuffled after each pass; `start` skips what earlier parts of a run drew."""

    def __init__(self, tasks: Sequence[SumTask], seed: int, start: int = 0) -> None:
        self._tasks = list(tasks)
        self._seed = seed
        self._next = start

    def sample(self, n_samples: int) -> list[SumTask]:
        drawn = [self._at(self._next + i) for i in range(n_samples)]
        self._next += n_samples
        return drawn

    def _at(self, index: int) -> SumTask:
        lap, place = divmod(index, len(self._tasks))
        order = list(range(len(self._tasks)))
        random.Random(f"lap-{self._seed}-{lap}").shuffle(order)
        return self._tasks[order[place]]


def last_number(text: str) -> int | None:
    """The answer that a text gives: its last whole number."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


def is_right(task: SumTask, text: str) -> bool:
    """The held-out metric: the last number of the text is the sum, whatever stands around it."""
    return last_number(text) == task.answer


def reward(task: SumTask, text: str, finish_reason: str) -> float:
    """0 for a wrong answer; 0.4 for the right one, 0.3 more if the answer ends by itself, 0.3 more if it stands alone."""
    if not is_right(task, text):
        return 0.0
    alone = text.strip().rstrip(".") == str(task.answer)
    return 0.4 + 0.3 * (finish_reason == "stop") + 0.3 * alone
