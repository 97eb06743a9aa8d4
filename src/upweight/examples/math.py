"""Competition mathematics with boxed answers, on the DAPO data set of the Hugging Face hub.

Run with `python -m upweight.examples.math --job-id ID` after `pip install 'upweight[math]'` and setting TOKENFACTORY_API_KEY
and TOKENFACTORY_BASE_URL; TOKENFACTORY_ROLLOUT_ variables replace the sizes below.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import click
from pydantic_settings import BaseSettings

from upweight.api_client import TokenFactory
from upweight.examples.utils import call_concurrently, group_advantages, parse_completion, version_info
from upweight.rollout import RolloutConfig, RolloutContext, RolloutRunner
from upweight.rollout.models import Sample, SampleGroup

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

DEFAULT_DATASET_PATH = "antonpl/math-dapo-25k"
DEFAULT_DATASET_SPLIT = "train"
QUESTION_SUFFIX = "\n\nReason step by step, then write the final answer as \\boxed{…}."

_QUESTION_COLUMNS = ("question", "problem", "prompt")
_ANSWER_COLUMNS = ("answer", "solution")
_IGNORED = re.compile(r"\\left|\\right|\\[,;! ]|\\text\s*|[\s${}]")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")


@dataclass
class MathTask:
    question: str
    answer: str


class MathExampleConfig(BaseSettings):
    """Settings of this example, also from the environment."""

    fewshot: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 2048
    reject_equal_rewards: bool = True


class MathDAPODataset:
    """Tasks in random order: with replacement without end, else each row once. `rows` replaces the download."""

    def __init__(
        self,
        path: str = DEFAULT_DATASET_PATH,
        split: str = DEFAULT_DATASET_SPLIT,
        *,
        seed: int = 0,
        with_replacement: bool = True,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._rows = _download(path, split) if rows is None else rows
        self._random = Random(seed)
        self._order = None if with_replacement else self._random.sample(range(len(self._rows)), len(self._rows))

    def sample(self, n_samples: int) -> list[MathTask]:
        if self._order is None:
            chosen = self._random.choices(range(len(self._rows)), k=n_samples)
        else:
            chosen, self._order = self._order[:n_samples], self._order[n_samples:]
        return [_task_of(self._rows[index]) for index in chosen]


def _download(path: str, split: str) -> Sequence[Mapping[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("the data set needs the package datasets: pip install 'upweight[math]'") from error
    loaded: Sequence[Mapping[str, Any]] = load_dataset(path, split=split)
    return loaded


def _task_of(row: Mapping[str, Any]) -> MathTask:
    return MathTask(question=str(_column(row, _QUESTION_COLUMNS)), answer=str(_column(row, _ANSWER_COLUMNS)))


def _column(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"a row has the columns {', '.join(row)}; one of {', '.join(names)} is needed")


def standard_fewshot_prefix() -> list[dict[str, str]]:
    """Two solved problems as a conversation."""
    solved = [
        (
            "A box holds 4 red and 6 blue balls. What is the chance that a ball drawn at random is red?",
            "There are 4 + 6 = 10 balls and 4 of them are red, so the chance is 4/10 = 2/5. \\boxed{\\frac{2}{5}}",
        ),
        (
            "For which x does 3x - 7 = 11 hold?",
            "Adding 7 on both sides gives 3x = 18. Dividing by 3 gives x = 6. \\boxed{6}",
        ),
    ]
    return [
        message
        for question, solution in solved
        for message in (
            {"role": "user", "content": question + QUESTION_SUFFIX},
            {"role": "assistant", "content": solution},
        )
    ]


def build_messages(task: MathTask, *, fewshot: bool = True) -> list[dict[str, str]]:
    prefix = standard_fewshot_prefix() if fewshot else []
    return [*prefix, {"role": "user", "content": task.question + QUESTION_SUFFIX}]


def check_format(response: str) -> bool:
    """Whether the response holds a closed, non-empty box."""
    return bool(_last_box(response))


def check_answer(response: str, answer: str) -> bool:
    """Whether the last box holds the answer: as a number, else as text without spacing and delimiters."""
    given = _last_box(response)
    return given is not None and _normal(given) == _normal(_last_box(answer) or answer)


def reward_fn(response: str, answer: str) -> float:
    """−1 without a box, 0 for a wrong answer, 1 for the right one."""
    if not check_format(response):
        return -1.0
    return 1.0 if check_answer(response, answer) else 0.0


def _last_box(text: str) -> str | None:
    """What stands between the braces of the last \\boxed{…}; None if there is none or it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end].strip()
    return None


def _normal(text: str) -> Fraction | str:
    plain = _IGNORED.sub("", _FRACTION.sub(r"(\1)/(\2)", text)).rstrip(".")
    number = re.sub(r"[(),]", "", plain)
    try:
        return Fraction(number)
    except (ValueError, ZeroDivisionError):
        return plain


def roll_out_task(task: MathTask, context: RolloutContext, example_config: MathExampleConfig) -> SampleGroup:
    """Ask G times at once; a group whose rewards are all equal teaches nothing and is rejected."""
    n = context.config.num_samples_per_task
    completions = call_concurrently(partial(_complete, task, context, example_config), n)
    rewards_G = [reward_fn(c.choices[0].message.content or "", task.answer) for c in completions]
    if example_config.reject_equal_rewards and n > 1 and len(set(rewards_G)) == 1:
        return SampleGroup(is_rejected=True)
    advantages_G = group_advantages(rewards_G)
    return SampleGroup(samples=list(map(_to_sample, completions, rewards_G, advantages_G)))


def _complete(task: MathTask, context: RolloutContext, example_config: MathExampleConfig) -> ChatCompletion:
    messages: Any = build_messages(task, fewshot=example_config.fewshot)
    return context.openai_client.chat.completions.create(
        model=context.config.model_name,
        messages=messages,
        temperature=example_config.temperature,
        top_p=example_config.top_p,
        max_tokens=example_config.max_tokens,
        extra_body={"return_token_ids": True, "logprobs": True},
    )


def _to_sample(completion: ChatCompletion, reward: float, advantage: float) -> Sample:
    token_ids, logprobs, mask = parse_completion(completion)
    return Sample(
        token_ids=token_ids,
        logprobs=logprobs,
        mask=mask,
        normalized_reward=advantage,
        debug_info={"reward": reward, **version_info(completion)},
    )


@click.command(help="Feed a job with groups of answers to competition problems.")
@click.option("--job-id", required=True)
@click.option("--model-name", required=True)
@click.option("--batch-size", default=64, show_default=True, help="samples per batch")
@click.option("--num-samples-per-task", default=8, show_default=True)
@click.option("--num-batches", type=int, default=None, help="none = until the job ends")
@click.option("--fewshot/--no-fewshot", default=True, show_default=True)
@click.option("--dataset-path", default=DEFAULT_DATASET_PATH, show_default=True)
@click.option("--dataset-split", default=DEFAULT_DATASET_SPLIT, show_default=True)
@click.option("--seed", default=0, show_default=True, help="order of the tasks")
def main(dataset_path: str, dataset_split: str, seed: int, fewshot: bool, **sizes: Any) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with TokenFactory() as api_client:
        runner = RolloutRunner(
            api_client=api_client,
            config=RolloutConfig(**sizes),
            dataset=MathDAPODataset(dataset_path, dataset_split, seed=seed),
            rollout_fn=partial(roll_out_task, example_config=MathExampleConfig(fewshot=fewshot)),
        )
        print(runner.run())


if __name__ == "__main__":
    main()
