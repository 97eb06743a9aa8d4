"""A rollout function whose reward a tiny random model can earn: the share of even token ids."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from upweight.examples.utils import group_advantages, parse_completion, version_info
from upweight.rollout import RolloutContext
from upweight.rollout.models import Sample, SampleGroup


class Numbers:
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def sample(self, n_samples: int) -> list[int]:
        return [self._random.randrange(1000) for _ in range(n_samples)]


def even_share(answer: list[int]) -> float:
    return fmean(1.0 - token % 2 for token in answer)


def slow_even_share(answer: list[int]) -> float:
    """Long enough to be killed in."""
    time.sleep(0.02)
    return even_share(answer)


def roll_out_number(
    task: int, context: RolloutContext, grade: Callable[[list[int]], float] = even_share
) -> SampleGroup:
    samples, rewards = [], []
    for _ in range(context.config.num_samples_per_task):
        completion = context.openai_client.chat.completions.create(
            model=context.config.model_name,
            messages=[{"role": "user", "content": f"Number {task}"}],
            extra_body={"return_token_ids": True, "logprobs": True},
        )
        token_ids, logprobs, mask = parse_completion(completion)
        reward = grade([token for token, trained in zip(token_ids, mask, strict=True) if trained])
        rewards.append(reward)
        debug: dict[str, Any] = {"reward": reward, **version_info(completion)}
        samples.append(
            Sample(token_ids=token_ids, logprobs=logprobs, mask=mask, normalized_reward=0.0, debug_info=debug)
        )
    if len(set(rewards)) == 1:
        return SampleGroup(is_rejected=True)
    for sample, advantage in zip(samples, group_advantages(rewards), strict=True):
        sample.normalized_reward = advantage
    return SampleGroup(samples=samples)
