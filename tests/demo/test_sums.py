import math
from collections import Counter

import pytest

from upweight.demo.sums import SumDataset, SumTask, last_number, reward, split_tasks


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_sums_never_repeat_a_training_sum_in_either_order(seed: int) -> None:
    split = split_tasks(seed)
    trained = {frozenset((t.a, t.b)) for t in split.train}
    assert len(split.held_out) >= 128
    assert not any(frozenset((t.a, t.b)) in trained for t in split.held_out)
    assert len(split.train) + len(split.held_out) == 400


def test_seeds_split_differently_and_repeatably() -> None:
    assert split_tasks(0) == split_tasks(0)
    assert split_tasks(0).held_out != split_tasks(1).held_out


def test_dataset_goes_on_where_an_earlier_part_stopped() -> None:
    tasks = split_tasks(0).train
    whole = SumDataset(tasks, seed=3).sample(2 * len(tasks))
    first, rest = (
        SumDataset(tasks, seed=3).sample(100),
        SumDataset(tasks, seed=3, start=100).sample(2 * len(tasks) - 100),
    )
    assert first + rest == whole
    assert Counter(whole) == dict.fromkeys(tasks, 2)


@pytest.mark.parametrize(
    ("text", "expected"), [("27", 27), ("13 + 14 = 27.", 27), ("none", None), ("", None), ("27 or 28", 28)]
)
def test_last_number(text: str, expected: int | None) -> None:
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        ("27", "stop", 1.0),
        (" 27.", "stop", 1.0),
        ("13 + 14 = 27", "stop", 0.7),
        ("13 + 14 = 27", "length", 0.4),
        ("27", "length", 0.7),
        ("28", "stop", 0.0),
        ("27 = 13 + 14", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_reward(text: str, finish: str, expected: float) -> None:
    assert math.isclose(reward(SumTask(13, 14), text, finish), expected)
