"""One completion per task.

Run with `python -m upweight.examples.basic` after setting TOKENFACTORY_API_KEY, TOKENFACTORY_BASE_URL and
TOKENFACTORY_ROLLOUT_JOB_ID; other TOKENFACTORY_ROLLOUT_ variables replace the sizes below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import choices

from pydantic_settings import BaseSettings

from upweight.examples import command
from upweight.examples.utils import parse_completion, version_info
from upweight.rollout import RolloutConfig, RolloutContext, RolloutRunner
from upweight.rollout.models import Sample, SampleGroup


@dataclass
class Task:
    question: str
    answer: str


class Dataset:
    """Draws tasks with replacement, so it never ends."""

    def __init__(self) -> None:
        self._tasks = [Task(question="Tell me a random number.", answer="42")]

    def sample(self, n_samples: int) -> list[Task]:
        return choices(self._tasks, k=n_samples)


class MyConfig(BaseSettings):
    """Settings of this example, also from the environment."""

    system_prompt: str = "You are a helpful assistant. Reply with the answer only."
    max_tokens: int | None = None


class ExampleConfig(RolloutConfig):
    """The settings of a run, with sizes that suit a first try."""

    model_name: str = "Qwen/Qwen2.5-1.5B-Instruct"
    batch_size: int = 8
    num_samples_per_task: int = 1
    num_batches: int | None = 2


def reward_fn(response: str, answer: str) -> float:
    """1 for the answer alone, 0.5 for an answer with more around it, else 0."""
    text = response.strip()
    if text == answer:
        return 1.0
    return 0.5 if answer in text else 0.0


def roll_out_task(task: Task, context: RolloutContext, my_config: MyConfig) -> SampleGroup:
    """Ask once and score the response."""
    completion = context.openai_client.chat.completions.create(
        model=context.config.model_name,
        messages=[
            {"role": "system", "content": my_config.system_prompt},
            {"role": "user", "content": task.question},
        ],
        max_tokens=my_config.max_tokens,
        extra_body={"return_token_ids": True, "logprobs": True},
    )
    token_ids, logprobs, mask = parse_completion(completion)
    response = completion.choices[0].message.content or ""
    reward = reward_fn(response=response, answer=task.answer)
    sample = Sample(
        token_ids=token_ids,
        logprobs=logprobs,
        mask=mask,
        normalized_reward=reward,
        debug_info={"reward": reward, **version_info(completion)},
    )
    return SampleGroup(samples=[sample])


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
