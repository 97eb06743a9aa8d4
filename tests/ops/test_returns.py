"""Returns and GAE against float64 loops over the unmasked places."""

import numpy as np
import pytest

from tests.ops.float64 import POISON, check, run
from upweight.ops.returns import at_last_action, discounted_returns, gae

GAMMA, LAM = 0.9, 0.7
R = np.array([[1.0, 0.5, -2.0, 3.0, 0.25], [0.3, 0.1, 2.0, -1.0, 4.0]], np.float32)
V = np.array([[0.2, 1.0, -0.5, 0.75, 0.1, 0.6], [1.5, -0.3, 0.4, 0.9, 2.0, -0.7]], np.float32)
M = np.array([[0, 1, 1, 0, 1], [1, 1, 0, 1, 0]], np.float32)
D = np.array([[0, 0, 1, 0, 0], [0, 0, 0, 1, 0]], np.float32)


def returns_of(r: np.ndarray, d: np.ndarray) -> np.ndarray:
    out = np.zeros(r.shape)
    for row in range(len(r)):
        running = 0.0
        for t in reversed(np.flatnonzero(M[row])):
            running = r[row, t] + GAMMA * (1 - d[row, t]) * running
            out[row, t] = running
    return out


def gae_of(r: np.ndarray, v: np.ndarray, d: np.ndarray, last: np.ndarray) -> np.ndarray:
    out = np.zeros(r.shape)
    for row in range(len(r)):
        places = np.flatnonzero(M[row])
        values = [*v[row, places], last[row]]
        running = 0.0
        for k in reversed(range(len(places))):
            t = places[k]
            delta = r[row, t] + GAMMA * values[k + 1] * (1 - d[row, t]) - values[k]
            running = delta + GAMMA * LAM * (1 - d[row, t]) * running
            out[row, t] = running
    return out


def test_returns() -> None:
    check(lambda r: discounted_returns(r, M, GAMMA), lambda r: returns_of(r, 0 * D), R)
    check(lambda r: discounted_returns(r, M, GAMMA, D), lambda r: returns_of(r, D), R, eager=True)


def test_gae_with_and_without_a_last_value() -> None:
    zero = np.zeros(2)
    check(lambda r: gae(r, V, M, GAMMA, LAM, D), lambda r: gae_of(r, V, D, V[:, 5]), R, eager=True)
    check(lambda r: gae(r, V[:, :5], M, GAMMA, LAM), lambda r: gae_of(r, V, 0 * D, zero), R)
    check(lambda v: gae(R, v, M, GAMMA, LAM, D), lambda v: gae_of(R, v, D, v[:, 5]), V)
    check(lambda v: gae(R, v, M, GAMMA, LAM), lambda v: gae_of(R, v, 0 * D, v[:, 5]), V)


def test_known_numbers() -> None:
    ones = np.ones((1, 3), np.float32)
    np.testing.assert_allclose(discounted_returns(np.array([[1, 1, 1]]), ones, 0.5), [[1.75, 1.5, 1.0]])
    # γ = λ = 1: the advantage is what is still to come less the value.
    np.testing.assert_allclose(gae(ones, np.array([[0.5, 0.5, 0.5]]), ones, 1.0, 1.0), [[2.5, 1.5, 0.5]])
    # λ = 0: one step ahead.
    np.testing.assert_allclose(gae(ones, np.array([[1.0, 2.0, 3.0, 4.0]]), ones, 1.0, 0.0), [[2, 2, 2]])


@pytest.mark.parametrize("poison", POISON)
def test_c11_masked_entries(poison: float) -> None:
    def dirty(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.where(M > 0, x[:, :5], np.float32(poison)), x[:, 5:]], axis=1)

    pairs = [
        (lambda r: discounted_returns(r, M, GAMMA, D), R),
        (lambda r: gae(r, dirty(V), M, GAMMA, LAM, dirty(D)), R),
        (lambda v: gae(R, v, M, GAMMA, LAM, D), V),
    ]
    for f, x in pairs:
        values, gradient = run(f, dirty(x), False)
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(values, run(f, x, False)[0])
        np.testing.assert_array_equal(gradient, run(f, x, False)[1])
    np.testing.assert_array_equal(gae(R, dirty(V), M, GAMMA, LAM, dirty(D)), gae(R, V, M, GAMMA, LAM, D))


def test_what_follows_the_end_of_an_episode_may_hold_anything() -> None:
    ones = np.ones((1, 2), np.float32)
    got = gae(ones, np.array([[0.5, 0.25, np.nan]]), ones, 1.0, 1.0, np.array([[0, 1]]))
    np.testing.assert_allclose(got, [[1.5, 0.75]])


def test_c01_the_last_active_action_gets_the_reward() -> None:
    mask = np.array([[0, 1, 1, 0], [1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
    got = at_last_action(np.array([5, 6, 7, 8]), mask)
    np.testing.assert_array_equal(got, [[0, 0, 5, 0], [6, 0, 0, 0], [0, 0, 0, 7], [0, 0, 0, 0]])
    assert got.dtype == np.float32


def test_c17_a_repeated_shape_compiles_nothing() -> None:
    ones = np.ones((1, 9), np.float32)
    discounted_returns(ones, ones, 0.5)
    before = discounted_returns._cache_size()
    for gamma in (0.1, 0.2, 0.9):
        discounted_returns(2 * ones, ones, gamma)
    assert discounted_returns._cache_size() == before


def test_c30_results_are_float32() -> None:
    for dtype in (np.int32, np.float16):
        assert discounted_returns(R.astype(dtype), M, 0.9).dtype == np.float32
        assert gae(R.astype(dtype), V.astype(dtype), M, 0.9, 0.9).dtype == np.float32
