"""A group of completions per task, whose rewards are normalised within the group.

Run with `python -m upweight.examples.grpo` after setting TOKENFACTORY_API_KEY, TOKENFACTORY_BASE_URL and
TOKENFACTORY_ROLLOUT_JOB_ID; other TOKENFACTORY_ROLLOUT_ variables replace the sizes below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import choices, randint
from typing import TYPE_CHECKING

from pydantic_settings import BaseSettings

from upweight.examples import command
from upweight.examples.utils import call_concurrently, group_advantages, parse_completion, scored_sample
from upweight.rollout import RolloutConfig, RolloutContext, RolloutRunner
from upweight.rollout.models import Sample, SampleGroup

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion


@dataclass
class Task:
    question: str
    answer: str


class Dataset:
    """Sums of two small numbers, drawn with replacement, so it never ends."""

    def __init__(self) -> None:
        pairs = [(randint(1, 20), randint(1, 20)) for _ in range(100)]
        self._tasks = [Task(question=f"What is {a} + {b}?", answer=str(a + b)) for a, b in pairs]

    def sample(self, n_samples: int) -> list[Task]:
        return choices(self._tasks, k=n_samples)


class MyConfig(BaseSettings):
    """Settings of this example, also from the environment."""

    system_prompt: str = "You are a helpful assistant. Reply with the answer only."
    temperature: float = 1.0
    max_tokens: int | None = None
    reject_equal_rewards: bool = True


class ExampleConfig(RolloutConfig):
    """The settings of a run, with sizes that suit a first try."""

    model_name: str = "Qwen/Qwen2.5-1.5B-Instruct"
    batch_size: int = 16
    num_samples_per_task: int = 4
    num_batches: int | None = 2


def reward_fn(response: str, answer: str) -> float:
    """1 for the answer alone, 0.5 for an answer with more around it, else 0."""
    text = response.strip()
    if text == answer:
        return 1.0
    return 0.5 if answer in text else 0.0


def roll_out_task(task: Task, context: RolloutContext, my_config: MyConfig) -> SampleGroup:
    """Ask G times at once; a group whose rewards are all equal teaches nothing and is rejected."""
    n = context.config.num_samples_per_task
    completions = call_concurrently(partial(_complete, task, context, my_config), n)
    rewards_G = [reward_fn(response=c.choices[0].message.content or "", answer=task.answer) for c in completions]
    if my_config.reject_equal_rewards and n > 1 and len(set(rewards_G)) == 1:
        return SampleGroup(is_rejected=True)
    advantages_G = group_advantages(rewards_G)
    return SampleGroup(samples=list(map(_to_sample, completions, rewards_G, advantages_G)))


def _complete(task: Task, context: RolloutContext, my_config: MyConfig) -> ChatCompletion:
    return context.openai_client.chat.completions.create(
        model=context.config.model_name,
        messages=[
            {"role": "system", "content": my_config.system_prompt},
            {"role": "user", "content": task.question},
        ],
        temperature=my_config.temperature,
        max_tokens=my_config.max_tokens,
        extra_body={"return_token_ids": True, "logprobs": True},
    )


def _to_sample(completion: ChatCompletion, reward: float, advantage: float) -> Sample:
    return scored_sample(completion, parse_completion(completion), reward, advantage)


def main() -> None:
    command.begin(__doc__)
    with command.client_from_environment() as api_client:
        runner = RolloutRunner(
            api_client=api_client,
            config=command.from_environment(ExampleConfig),  # the job id comes from there
            dataset=Dataset(),
            rollout_fn=partial(roll_out_task, my_config=command.from_environment(MyConfig)),
        )
        print(command.finish(runner))


if __name__ == "__main__":
    main()
