"""The sizes and settings of the demo, and how many batches fit its time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from upweight.demo.evaluation import MAX_TOKENS
from upweight.demo.record import DemoOptions
from upweight.demo.rollout import RolloutSettings

AIM_SECONDS = 160.0  # from start to result
FEWEST, MOST, QUICK = 8, 16, 3
QUICK_EVAL_TASKS = 32
MISMATCH_LIMIT = 1e-3  # |Δ log-prob| between sampler and trainer that fp32 noise stays below


@dataclass(frozen=True)
class DemoPlan:
    options: DemoOptions
    groups: int = 4
    group_size: int = 8
    rollout: RolloutSettings = field(default_factory=RolloutSettings)

    @property
    def batch_size(self) -> int:
        return self.groups * self.group_size

    def fixed_batches(self) -> int | None:
        """The number of batches when no calibration is needed to tell it."""
        return self.options.steps or (QUICK if self.options.quick else None)

    def fitting_batches(self, step_seconds: float, token_seconds: float, elapsed: float, eval_tasks: int) -> int:
        """As many batches as fit, from a measured batch and a measured decode step of a full engine.

        Evaluations answer `eval_tasks` tasks in waves of 32 rows; before training the answers are long, after it short.
        """
        waves = -(-eval_tasks // 32)
        evaluations = waves * token_seconds * (MAX_TOKENS + 12)
        start_up = 15.0
        left = AIM_SECONDS - elapsed - start_up - evaluations
        return max(FEWEST, min(MOST, int(left / (1.3 * step_seconds))))  # 1.3: rejected groups are drawn again

    def method(self, batches: int) -> dict[str, Any]:
        """The method object of the job."""
        tuned: dict[str, Any] = (
            {"learning_rate": 3e-4, "lr_schedule": "linear", "lora": {"rank": 16, "alpha": 32}, "checkpoint_every": 4}
            if self.options.lora
            else {"learning_rate": 2e-5, "checkpoint_every": 10}
        )
        settings = {
            "batch_size": self.batch_size,
            "num_batches": batches,
            "algorithm": "grpo",
            "sampling": {"max_tokens": self.rollout.max_tokens, "max_context": 512},
            "keep_checkpoints": 1,
            "seed": self.options.seed,
            **tuned,
        }
        return {"type": "reinforcement", "reinforcement": settings}
