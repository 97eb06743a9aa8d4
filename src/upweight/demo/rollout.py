"""The demo's rollout function: an ordinary one, as a user would write it with the SDK and the `openai` client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from upweight.demo.sums import SumTask, reward
from upweight.examples.utils import call_concurrently, group_advantages, parse_completion, scored_sample
from upweight.rollout import RolloutContext
from upweight.rollout.models import SampleGroup

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion


@dataclass(frozen=True)
class RolloutSettings:
    temperature: float = 1.0
    max_tokens: int = 12


def roll_out_sum(task: SumTask, context: RolloutContext, settings: RolloutSettings) -> SampleGroup:
    """Asks G times at once, scores by rule, normalises within the group; a group without differences is rejected."""
    size = context.config.num_samples_per_task
    completions = call_concurrently(partial(_ask, task, context, settings), size)
    rewards = [reward(task, c.choices[0].message.content or "", c.choices[0].finish_reason or "") for c in completions]
    if len(set(rewards)) == 1:
        return SampleGroup(is_rejected=True)
    return SampleGroup(
        samples=[
            scored_sample(completion, parse_completion(completion), raw, advantage)
            for completion, raw, advantage in zip(completions, rewards, group_advantages(rewards), strict=True)
        ]
    )


def _ask(task: SumTask, context: RolloutContext, settings: RolloutSettings) -> ChatCompletion:
    return context.openai_client.chat.completions.create(
        model=context.config.model_name,
        messages=task.messages,  # type: ignore[arg-type]
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        extra_body={"return_token_ids": True, "logprobs": True},
    )
