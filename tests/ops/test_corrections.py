"""Importance weights, bands, overlong punishment and value losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.float64 import POISON, check
from upweight.ops.corrections import importance_weight, inside_band, overlong_punishment
from upweight.ops.value_loss import explained_variance, moments_of, squared_error

OLD = np.log(np.array([[4.0, 1.0, 0.5], [2.0, 1.0, 1.0]], np.float32))
ZERO = np.zeros_like(OLD)
MASK = np.array([[1, 1, 0], [1, 1, 1]], np.float32)


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    np.testing.assert_allclose(importance_weight(OLD, ZERO, MASK), [[4, 1, 1], [2, 1, 1]], rtol=1e-6)
    np.testing.assert_allclose(importance_weight(OLD, ZERO, MASK, 3.0), [[3, 1, 1], [2, 1, 1]], rtol=1e-6)
    assert not np.asarray(jax.grad(lambda old: importance_weight(old, ZERO, MASK).sum())(jnp.asarray(OLD))).any()


@pytest.mark.parametrize("poison", POISON)
def test_masked_places_of_weights_and_bands(poison: float) -> None:
    dirty = np.where(MASK > 0, OLD, np.float32(poison))
    np.testing.assert_array_equal(importance_weight(dirty, dirty, MASK), np.ones_like(OLD))
    for by_sequence in (False, True):
        clean = inside_band(OLD, ZERO, MASK, (0.5, 1.9), by_sequence=by_sequence)
        after = inside_band(dirty, ZERO, MASK, (0.5, 1.9), by_sequence=by_sequence)
        np.testing.assert_array_equal(clean, after)


def test_bands_by_token_and_by_sequence() -> None:
    assert inside_band(OLD, ZERO, MASK, (0.5, 3.0)).tolist() == [[False, True, True], [True, True, True]]
    # Mean log-ratios: ln 2 of the first row, ln 2 / 3 of the second, which is a ratio of 1.26.
    assert inside_band(OLD, ZERO, MASK, (0.5, 1.9), by_sequence=True).tolist() == [[False] * 3, [True] * 3]


def test_overlong_punishment_falls_over_the_buffer() -> None:
    got = overlong_punishment(np.array([3, 16, 17, 18, 20, 25]), limit=20, buffer=4)
    np.testing.assert_allclose(got, [0, 0, -0.25, -0.5, -1, -1])


def test_value_losses() -> None:
    returns, old = np.array([1.0, 1.0, -1.0, 0.0], np.float32), np.array([0.0, 2.0, 0.5, 0.0], np.float32)
    values = np.array([0.8, 1.0, 0.4, 0.1], np.float32)
    check(lambda v: squared_error(v, returns), lambda v: (v - returns) ** 2, values)

    def clipped(v: np.ndarray) -> np.ndarray:
        near = np.clip(v, old - 0.2, old + 0.2)
        return np.maximum((v - returns) ** 2, (near - returns) ** 2)

    check(lambda v: squared_error(v, returns, old, 0.2), clipped, values)
    np.testing.assert_allclose(squared_error(values, returns, old, 0.2), [0.64, 0.64, 1.96, 0.01], rtol=1e-5)


def test_explained_variance() -> None:
    def of(values: np.ndarray, returns: np.ndarray) -> float:
        return float(explained_variance(*(jnp.mean(x) for x in moments_of(values, returns))))

    returns = np.array([0.0, 1.0, 2.0], np.float32)
    assert of(returns, returns) == 1.0
    assert of(0 * returns, returns) == 0.0
    assert of(returns / 2, returns) == pytest.approx(0.75)
    assert of(returns + 7, returns) == pytest.approx(1.0)
    assert np.isnan(of(returns, 0 * returns + 0.1))
