"""Advantages of contiguous groups against float64, and the rule of groups without variance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.float64 import check
from upweight.ops.advantages import ADVANTAGES
from upweight.ops.grouped_advantages import grouped_advantages

R = np.array([0.5, -1.0, 2.0, 0.25, 1.0, 0.0, 0.75, -3.0, 4.0, 1.0, 1.0, 1.0], np.float32)
VALID = np.array([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1])
ONES = np.ones(12)


def expected(name: str, r: np.ndarray, valid: np.ndarray, ddof: int, batch_std: bool) -> np.ndarray:
    out = np.zeros(12)
    whole = r[valid > 0].std(ddof=ddof)
    for start in range(0, 12, 4):
        mine = [i for i in range(start, start + 4) if valid[i]]
        values = r[mine]
        if np.ptp(values) < 1e-5:
            continue
        for i in mine:
            if name == "rloo":
                out[i] = r[i] - (values.sum() - r[i]) / (len(mine) - 1)
            else:
                scale = 1 if name == "group_centered" else (whole if batch_std else values.std(ddof=ddof)) + 1e-8
                out[i] = (r[i] - values.mean()) / scale
    return out


@pytest.mark.parametrize("name", ADVANTAGES)
def test_values_and_slopes(name: str) -> None:
    for valid, ddof, batch_std in ((ONES, 0, False), (VALID, 1, False), (VALID, 0, True)):
        check(
            lambda r, v=valid, d=ddof, b=batch_std: grouped_advantages(name, r, v, 4, ddof=d, batch_std=b).advantages,
            lambda r, v=valid, d=ddof, b=batch_std: expected(name, r, v, d, b),
            np.where(np.arange(12) < 8, R, R + np.arange(12)).astype(np.float32),
            eager=name == "group" and ddof == 1,
        )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_both_forms_are_one(name: str) -> None:
    groups = np.repeat(np.arange(3), 4)
    got = grouped_advantages(name, R, ONES, 4).advantages
    np.testing.assert_allclose(got, ADVANTAGES[name](R, groups), rtol=1e-5, atol=1e-7)


def test_c03_population_std_by_default_and_sample_std_on_demand() -> None:
    r, ones = np.array([0, 1, 1, 1]), np.ones(4)
    third = 0.57735026
    np.testing.assert_allclose(
        grouped_advantages("group", r, ones, 4).advantages, [-1.7320508, third, third, third], rtol=1e-6
    )
    np.testing.assert_allclose(
        grouped_advantages("group", r, ones, 4, ddof=1).advantages, [-1.5, 0.5, 0.5, 0.5], rtol=1e-6
    )


@pytest.mark.parametrize("size", [2, 7, 64])
def test_c02_equal_rewards_give_exactly_zero(size: int) -> None:
    for name in ADVANTAGES:
        f = jax.jit(lambda r, name=name: grouped_advantages(name, r, jnp.ones(size), size))
        for reward in (0.7, 0.1, 1 / 3, -2.3, 1e6, 1e-9, 1):
            got = f(jnp.full(size, reward, jnp.float32))
            assert not np.asarray(got.advantages).any(), (name, reward)
            assert got.flat.tolist() == [True]


def test_rows_that_do_not_count() -> None:
    """NaN in an invalid row, a group without any valid row, and groups of one."""
    r = np.array([1.0, np.nan, 3.0, np.nan, np.nan, np.nan], np.float32)
    valid = np.array([1, 0, 1, 0, 0, 0])
    got = jax.jit(lambda r: grouped_advantages("group", r, valid, 3))(r)
    np.testing.assert_allclose(got.advantages, [-1, 0, 1, 0, 0, 0], rtol=1e-6)
    assert got.flat.tolist() == [False, False]
    slope = jax.jit(jax.grad(lambda r: grouped_advantages("group", r, valid, 3).advantages[0]))(jnp.asarray(r))
    assert np.isfinite(slope).all()
    for name in ADVANTAGES:
        assert not np.asarray(grouped_advantages(name, R, ONES, 1).advantages).any()


def test_a_reward_that_is_not_finite_spoils_its_own_group_only() -> None:
    r = np.array([np.inf, 1, 0, 1], np.float32)
    got = np.asarray(grouped_advantages("group", r, np.ones(4), 2).advantages)
    assert not np.isfinite(got[:2]).any()
    np.testing.assert_allclose(got[2:], [-1, 1], rtol=1e-6)
