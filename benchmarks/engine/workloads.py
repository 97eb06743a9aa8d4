"""The pieces of work, the same for every engine: prompts as token ids and the number of tokens each is answered with."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = 49152
MIXED_LENGTHS = [
    8, 8, 8, 12, 12, 16, 16, 16, 20, 20, 24, 24, 24, 28, 32, 32,
    32, 40, 40, 48, 48, 56, 64, 64, 80, 96, 112, 128, 160, 192, 224, 256,
]  # fmt: skip


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    lengths: list[int]
    top_p: float = 1.0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def workload(name: str, seed: int) -> Workload:
    """`group`: 4 prompts × 8 of 64 + 128 tokens; `top_p`: the same at top-p 0.9; `mixed`: 32 prompts, uneven answers.

    `single`: one prompt, 128 tokens, in an engine for one row; `single_of_32`: the same in an engine for 32.
    """
    draw = random.Random(seed)

    def prompt() -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(64)]

    if name in ("group", "top_p"):
        grouped = [one for one in [prompt() for _ in range(4)] for _ in range(8)]
        return Workload(grouped, [128] * 32, 0.9 if name == "top_p" else 1.0)
    if name == "mixed":
        return Workload([prompt() for _ in MIXED_LENGTHS], MIXED_LENGTHS)
    return Workload([prompt()], [128])


NAMES = ("group", "top_p", "mixed", "single", "single_of_32")
CONTEXT = 64 + max(MIXED_LENGTHS)
