"""Arguments of a runner that cannot be used are refused at once, in one line that names them and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from upweight.api_client import TokenFactory
from upweight.rollout import RolloutRunner

from . import helpers


def score(task: int, context: Any) -> dict[str, float]:
    return {"score": 1.0}


def construct(rollout_fn: Any = helpers.rollout, dataset: Any = helpers.Counting(), **evaluation: Any) -> None:
    with TokenFactory("http://127.0.0.1:9", "k") as client:
        RolloutRunner(client, helpers.config(), rollout_fn, dataset, **evaluation)


REFUSED = [
    (
        {"rollout_fn": None},
        TypeError,
        "rollout_fn is None, which cannot be called; give a function of task and context",
    ),
    ({"rollout_fn": helpers.good_sample()}, TypeError, "rollout_fn is Sample("),
    ({"dataset": [1, 2]}, TypeError, "dataset is [1, 2], which has no method sample(n); wrap it in SequenceDataset"),
    ({"dataset": None}, TypeError, "dataset is None, which has no method sample(n)"),
    ({"dataset": helpers.Counting}, TypeError, "dataset is the class Counting; give an object of it: Counting(…)"),
    ({"eval_every": 1}, ValueError, "eval_dataset and eval_fn missing beside eval_every=1; an evaluation needs both"),
    ({"eval_every": 1, "eval_fn": score}, ValueError, "eval_dataset missing beside eval_fn"),
    (
        {"eval_dataset": [], "eval_fn": score},
        ValueError,
        "eval_dataset is empty; give at least one task, or none of the three",
    ),
    ({"eval_dataset": [1]}, ValueError, "eval_fn missing beside eval_dataset"),
    (
        {"eval_dataset": [1], "eval_fn": score, "eval_every": 0},
        ValueError,
        "eval_every is 0; it must be a whole number",
    ),
    ({"eval_dataset": [1], "eval_fn": score, "eval_every": 0.5}, ValueError, "eval_every is 0.5; it must be a whole"),
    ({"eval_dataset": [1], "eval_fn": "score"}, TypeError, "eval_fn is 'score', which cannot be called"),
    ({"eval_dataset": 7, "eval_fn": score}, TypeError, "eval_dataset is 7, which is no list of tasks"),
]


@pytest.mark.parametrize(("arguments", "kind", "line"), REFUSED, ids=[line[:32] for _, _, line in REFUSED])
def test_arguments_that_cannot_be_used_are_refused(arguments: dict[str, Any], kind: type[Exception], line: str) -> None:
    with pytest.raises(kind) as caught:
        construct(**arguments)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
