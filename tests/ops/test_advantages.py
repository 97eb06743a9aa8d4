"""Advantages against formulas written out per group in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upweight.ops.advantages import ADVANTAGES


def expected(name: str, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    out = np.zeros(len(rewards))
    for group in set(groups.tolist()):
        mine = [i for i in range(len(rewards)) if groups[i] == group]
        values = [float(rewards[i]) for i in mine]
        mean = sum(values) / len(values)
        if max(values) - min(values) <= 1e-6 * max(1.0, abs(mean)):
            continue
        for i, value in zip(mine, values, strict=True):
            if name == "group":
                out[i] = (value - mean) / ((sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5 + 1e-8)
            elif name == "group_centered":
                out[i] = value - mean
            else:
                out[i] = value - (sum(values) - value) / (len(values) - 1)
    return out


@pytest.mark.parametrize("name", ADVANTAGES)
def test_uneven_and_interleaved_groups(name: str) -> None:
    rewards = np.array([1.0, 0.0, 5.0, 0.25, 1.0, -3.0, 0.5, 7.0, 1.0, 0.0], np.float32)
    groups = np.array([4, 0, 4, 7, 0, 7, 7, 2, 0, 0])
    np.testing.assert_allclose(ADVANTAGES[name](rewards, groups), expected(name, rewards, groups), rtol=1e-6, atol=1e-7)
    assert ADVANTAGES[name](rewards, groups).dtype == np.float32


@given(
    st.lists(
        st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(0, 4)),
        min_size=1,
        max_size=30,
    )
)
@settings(max_examples=100, deadline=None)
def test_any_groups(pairs: list[tuple[float, int]]) -> None:
    rewards = np.array([reward for reward, _ in pairs], np.float32)
    groups = np.array([group for _, group in pairs])
    for name, advantage in ADVANTAGES.items():
        np.testing.assert_allclose(advantage(rewards, groups), expected(name, rewards, groups), rtol=1e-4, atol=1e-4)


def test_known_numbers() -> None:
    rewards, groups = np.array([0, 1, 1, 1]), np.zeros(4, int)
    np.testing.assert_allclose(
        ADVANTAGES["group"](rewards, groups), [-1.7320508, 0.57735026, 0.57735026, 0.57735026], rtol=1e-6
    )
    np.testing.assert_array_equal(
        ADVANTAGES["group_centered"](rewards, groups), np.array([-0.75, 0.25, 0.25, 0.25], np.float32)
    )
    np.testing.assert_allclose(ADVANTAGES["rloo"](rewards, groups), [-1, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1 / 3, -2.3, 1e6, 1e-9])
def test_equal_rewards_give_exactly_zero_for_any_group_size(name: str, reward: float) -> None:
    for size in range(1, 65):
        rewards = np.full(size, reward, np.float32)
        assert not ADVANTAGES[name](rewards, np.zeros(size, int)).any(), size


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_reward_that_is_not_finite_spoils_its_own_group_only(name: str) -> None:
    rewards = np.array([np.inf, 1, 0, 1, np.nan, 2], np.float32)
    groups = np.array([0, 0, 1, 1, 2, 2])
    advantages = ADVANTAGES[name](rewards, groups)
    assert not np.isfinite(advantages[[0, 1, 4, 5]]).any()
    np.testing.assert_allclose(advantages[2:4], expected(name, rewards[2:4], groups[2:4]), rtol=1e-6)
