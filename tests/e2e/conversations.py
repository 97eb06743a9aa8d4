"""A rollout of three turns against the real server: the environment answers with what was said so far."""

from __future__ import annotations

from statistics import fmean

from upweight.examples.utils import group_advantages
from upweight.rollout import RolloutContext
from upweight.rollout.conversation import Conversation
from upweight.rollout.models import SampleGroup

TURNS = 3


def converse(task: int, context: RolloutContext) -> SampleGroup:
    conversations, rewards = [], []
    for _ in range(context.config.num_samples_per_task):
        conversation = Conversation(context, [{"role": "user", "content": f"Number {task}"}], max_tokens=5)
        tokens: list[int] = []
        for turn in range(TURNS):
            answer = conversation.ask()
            tokens += answer.token_ids
            conversation.add({"role": "user", "content": f"Turn {turn}: you said {answer.text!r}"})
        conversations.append(conversation)
        rewards.append(fmean(1.0 - token % 2 for token in tokens))
    if len(set(rewards)) == 1:
        return SampleGroup(is_rejected=True)
    advantages = group_advantages(rewards)
    return SampleGroup(
        samples=[c.sample(a, reward=r) for c, a, r in zip(conversations, advantages, rewards, strict=True)]
    )
