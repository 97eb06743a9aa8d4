"""The held-out evaluation: greedy answers through the job's endpoint, and a paired test of before against after."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upweight.demo.sums import SumTask, is_right

if TYPE_CHECKING:
    from openai import OpenAI

MAX_TOKENS = 32  # prompts have 28 to 30 tokens: an answer and its prompt fit the narrowest page table
PARALLEL = 32


@dataclass(frozen=True)
class Evaluation:
    """Answers to all held-out tasks, in their order."""

    right: list[bool]
    texts: list[str]

    @property
    def score(self) -> float:
        return sum(self.right) / len(self.right)


def evaluate(
    client: OpenAI, model: str, tasks: Sequence[SumTask], *, on_answer: Callable[[int], None] = lambda _: None
) -> Evaluation:
    """Asks every task once at temperature 0; `on_answer` is told how many are in."""

    def ask(task: SumTask) -> str:
        completion = client.chat.completions.create(
            model=model,
            messages=task.messages,  # type: ignore[arg-type]
            temperature=0.0,
            max_tokens=MAX_TOKENS,
        )
        return completion.choices[0].message.content or ""

    texts = []
    pool = ThreadPoolExecutor(max_workers=PARALLEL)
    try:
        for text in pool.map(ask, tasks):
            texts.append(text)
            on_answer(len(texts))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return Evaluation([is_right(task, text) for task, text in zip(tasks, texts, strict=True)], texts)


def paired_p_value(before: Sequence[bool], after: Sequence[bool]) -> float:
    """One-sided exact McNemar test: how likely so many more gains than losses are if each were as likely as the other.

    Of the tasks whose outcome changed, gains are Binomial(changed, ½) under that hypothesis (McNemar 1947).
    """
    gains = sum(a and not b for b, a in zip(before, after, strict=True))
    losses = sum(b and not a for b, a in zip(before, after, strict=True))
    changed = gains + losses
    return sum(math.comb(changed, k) for k in range(gains, changed + 1)) / 2**changed


def has_improved(before: Evaluation, after: Evaluation) -> bool:
    """p < 0.01 and at least 0.10 more."""
    return paired_p_value(before.right, after.right) < 0.01 and after.score - before.score >= 0.10 - 1e-9
