"""Competition mathematics: a group of solutions per problem, scored by format and by the boxed answer.

Run with `python -m upweight.examples.math` after setting TOKENFACTORY_API_KEY, TOKENFACTORY_BASE_URL and
TOKENFACTORY_ROLLOUT_JOB_ID; it needs `pip install datasets` to load the problems. `--help` shows the options; other
TOKENFACTORY_ROLLOUT_ variables replace the sizes below.

Run it as a module: run as a file, its folder would come first on the path and hide Python's own `math`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import click
from pydantic_settings import BaseSettings, SettingsConfigDict

from upweight.examples import command
from upweight.examples.utils import call_concurrently, group_advantages, parse_completion, scored_sample
from upweight.rollout import RolloutConfig, RolloutContext, RolloutRunner
from upweight.rollout.datasets import SequenceDataset, position_in
from upweight.rollout.models import Sample, SampleGroup

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

DEFAULT_DATASET_PATH = "antonpl/math-dapo-25k"
DEFAULT_DATASET_SPLIT = "train"
QUESTION_SUFFIX = "\n\nReason step by step, then give the final answer once, inside \\boxed{}."

_QUESTION_COLUMNS = ("question", "problem", "prompt")
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution")
_BOX = "\\boxed{"


@dataclass
class MathTask:
    question: str
    answer: str


class MathExampleConfig(BaseSettings):
    """Settings of this example, also from UPWEIGHT_MATH_ variables."""

    model_config = SettingsConfigDict(env_prefix="UPWEIGHT_MATH_")

    dataset_path: str = DEFAULT_DATASET_PATH
    dataset_split: str = DEFAULT_DATASET_SPLIT
    dataset_seed: int = 0
    with_replacement: bool = True
    fewshot: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 2048
    reject_equal_rewards: bool = True


class ExampleRolloutConfig(RolloutConfig):
    """The settings of a run, with sizes that suit a first try."""

    model_name: str = "Qwen/Qwen2.5-1.5B-Instruct"
    batch_size: int = 64
    num_samples_per_task: int = 8
    num_batches: int | None = 10
    max_concurrency: int = 64


class MathDAPODataset:
    """Problems without end. With replacement each draw is independent; without, all come once before one comes again.

    Args:
        rows: records with a question and an answer; None loads `path` by the package `datasets`.
        seed: decides the order, with and without replacement.

    Raises:
        ImportError: the package `datasets` is missing.
        ValueError: there is no row, or a row has no column that could be the question or the answer.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]] | None = None,
        *,
        path: str = DEFAULT_DATASET_PATH,
        split: str = DEFAULT_DATASET_SPLIT,
        seed: int = 0,
        with_replacement: bool = True,
    ) -> None:
        self._rows: Sequence[Mapping[str, Any]] = _load(path, split) if rows is None else rows
        self._passes = SequenceDataset(self._rows, shuffle=True, seed=seed, epochs=None)
        self._seed, self._with_replacement = seed, with_replacement
        self._position = 0

    def sample(self, n_samples: int) -> list[MathTask]:
        first, self._position = self._position, self._position + n_samples
        if not self._with_replacement:
            return [_task(row) for row in self._passes.sample(n_samples)]
        return [_task(self._rows[self._drawn(place)]) for place in range(first, self._position)]

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = position_in(state)
        self._passes.restore(state)

    def _drawn(self, place: int) -> int:
        return Random(f"{self._seed}/{place}").randrange(len(self._rows))


def _load(path: str, split: str) -> Sequence[Mapping[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(f"loading {path} needs the package datasets: pip install datasets") from None
    rows: Sequence[Mapping[str, Any]] = load_dataset(path, split=split)
    return rows


def _task(row: Mapping[str, Any]) -> MathTask:
    # Some versions of this data keep the question as chat messages, and the answer in a record of its own.
    flat = {**row, **(row.get("reward_model") or {})}
    question, answer = (
        next((flat[name] for name in names if flat.get(name) is not None), None)
        for names in (_QUESTION_COLUMNS, _ANSWER_COLUMNS)
    )
    if question is None or answer is None:
        raise ValueError(
            f"a row has the columns {', '.join(row)}; it needs one of {', '.join(_QUESTION_COLUMNS)} "
            f"and one of {', '.join(_ANSWER_COLUMNS)}"
        )
    if isinstance(question, list):
        question = question[-1]["content"]
    return MathTask(question=str(question), answer=str(answer))


def standard_fewshot_prefix() -> list[dict[str, str]]:
    """One solved problem as chat messages, which shows the format."""
    return [
        {
            "role": "user",
            "content": f"A box holds 3 rows of 4 pens. 5 pens are sold. How many are left?{QUESTION_SUFFIX}",
        },
        {"role": "assistant", "content": "3 rows of 4 pens are 12 pens. Without the 5 sold, 7 are left.\n\n\\boxed{7}"},
    ]


def build_messages(question: str, *, fewshot: bool = True) -> list[dict[str, str]]:
    prefix = standard_fewshot_prefix() if fewshot else []
    return [*prefix, {"role": "user", "content": question + QUESTION_SUFFIX}]


def boxed_answers(response: str) -> list[str]:
    """Contents of all closed boxes, in order."""
    found: list[tuple[int, str]] = []
    open_braces: list[int | None] = []  # of each: where its content starts, if it is a box's
    for match in re.finditer(r"\\boxed\{|\{|\}", response):
        if match[0] != "}":
            open_braces.append(match.end() if match[0] == _BOX else None)
        elif open_braces and (start := open_braces.pop()) is not None:
            found.append((start, response[start : match.start()]))
    return [content for _, content in sorted(found)]


def check_format(response: str) -> bool:
    """Whether exactly one box holds something."""
    boxes = boxed_answers(response)
    return len(boxes) == 1 and bool(boxes[0].strip())


def check_answer(response: str, answer: str) -> bool:
    """Whether the last box holds `answer`, as a number or, tidied, as text."""
    boxes = boxed_answers(response)
    if not boxes:
        return False
    given, wanted = _tidy(boxes[-1]), _tidy(answer)
    numbers = _number(given), _number(wanted)
    return given == wanted or (numbers[0] is not None and numbers[0] == numbers[1])


def _tidy(text: str) -> str:
    text = re.sub(r"\\(?:left|right|[,;!: ])|\\text\s*|[\s$]|(?<=\d),(?=\d{3}\b)|\.$", "", text)
    return re.sub(r"\\[dt]frac", r"\\frac", text)


def _number(text: str) -> Fraction | None:
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d{1,50})\}\{(\d{1,50})\}", text)
    if fraction:
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}".replace("--", "")
    if not re.fullmatch(r"[+-]?\d{1,50}(?:\.\d{1,50}|/\d{1,50})?", text):  # bounded: a model may write 1e999999999
        return None
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None


def reward_fn(response: str, answer: str) -> float:
    """−1 for a bad format, 0 for a wrong answer, 1 for the right one."""
    if not check_format(response):
        return -1.0
    return 1.0 if check_answer(response, answer) else 0.0


def roll_out_task(task: MathTask, context: RolloutContext, math_config: MathExampleConfig) -> SampleGroup:
    """Ask G times at once; a group whose rewards are all equal teaches nothing and is rejected."""
    n = context.config.num_samples_per_task
    completions = call_concurrently(partial(_complete, task, context, math_config), n)
    rewards_G = [reward_fn(c.choices[0].message.content or "", task.answer) for c in completions]
    if math_config.reject_equal_rewards and n > 1 and len(set(rewards_G)) == 1:
        return SampleGroup(is_rejected=True)
    advantages_G = group_advantages(rewards_G)
    return SampleGroup(samples=list(map(_to_sample, completions, rewards_G, advantages_G)))


def _complete(task: MathTask, context: RolloutContext, math_config: MathExampleConfig) -> ChatCompletion:
    return context.openai_client.chat.completions.create(
        model=context.config.model_name,
        messages=build_messages(task.question, fewshot=math_config.fewshot),  # type: ignore[arg-type]
        temperature=math_config.temperature,
        top_p=math_config.top_p,
        max_tokens=math_config.max_tokens,
        extra_body={"return_token_ids": True, "logprobs": True},
    )


def _to_sample(completion: ChatCompletion, reward: float, advantage: float) -> Sample:
    return scored_sample(completion, parse_completion(completion), reward, advantage)


@click.command()
@click.option("--job-id", help="The job to feed; default: TOKENFACTORY_ROLLOUT_JOB_ID.")
@click.option("--dataset", "dataset_path", help=f"Name on the hub or folder; default: {DEFAULT_DATASET_PATH}.")
@click.option("--split", "dataset_split", help=f"Default: {DEFAULT_DATASET_SPLIT}.")
@click.option("--seed", "dataset_seed", type=int, help="Order of the problems; default: 0.")
@click.option("--replacement/--no-replacement", "with_replacement", default=None, help="Default: with replacement.")
@click.option("--fewshot/--no-fewshot", default=None, help="Default: with a solved problem before each.")
@click.option("--temperature", type=float, help="Default: 1.0.")
@click.option("--max-tokens", type=int, help="Default: 2048.")
def main(job_id: str | None, **options: Any) -> None:
    """Train a model on competition mathematics."""
    command.show_logs()
    mine = command.from_environment(
        MathExampleConfig, **{k: value for k, value in options.items() if value is not None}
    )
    with command.client_from_environment() as api_client:
        runner = RolloutRunner(
            api_client=api_client,
            config=command.from_environment(ExampleRolloutConfig, **({"job_id": job_id} if job_id else {})),
            dataset=_dataset(mine),
            rollout_fn=partial(roll_out_task, math_config=mine),
        )
        click.echo(command.finish(runner))


def _dataset(mine: MathExampleConfig) -> MathDAPODataset:
    try:
        return MathDAPODataset(
            path=mine.dataset_path,
            split=mine.dataset_split,
            seed=mine.dataset_seed,
            with_replacement=mine.with_replacement,
        )
    except ImportError as error:
        command.refuse(str(error))


if __name__ == "__main__":
    main()
