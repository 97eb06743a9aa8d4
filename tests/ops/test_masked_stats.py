"""Masked mean and whitening against float64, and what must not influence them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.float64 import POISON, check, run
from upweight.ops.masked_stats import masked_mean, masked_normalize, normalize

X = np.array([[0.5, -1.5, 2.0, 0.25], [3.0, -0.5, 1.0, 0.75]], np.float32)
M = np.array([[1, 1, 0, 1], [0, 1, 1, 0]], np.float32)


def whitened(x: np.ndarray) -> np.ndarray:
    kept = x[M > 0]
    return M * (x - kept.mean()) / np.sqrt(kept.var() + 1e-8)


def test_values_and_slopes() -> None:
    check(lambda x: masked_mean(x, M)[None], lambda x: x[M > 0].mean()[None], X)
    check(lambda x: masked_normalize(x, M), whitened, X, eager=True)
    check(normalize, lambda x: (x - x.mean()) / (x.std() + 1e-8), X)


def test_known_numbers() -> None:
    assert float(masked_mean(np.array([1, 2, 99]), np.array([1, 1, 0]))) == 1.5
    assert float(masked_mean(np.array([1.0]), np.array([0]))) == 0.0
    np.testing.assert_allclose(normalize(np.array([1, 2, 3])), [-1.2247449, 0, 1.2247449], rtol=1e-6)
    np.testing.assert_allclose(masked_normalize(np.array([1, 3, 50]), np.array([1, 1, 0])), [-1, 1, 0], rtol=1e-6)


@pytest.mark.parametrize("poison", POISON)
def test_c11_masked_entries(poison: float) -> None:
    dirty = np.where(M > 0, X, np.float32(poison))
    for f in (lambda x: masked_mean(x, M)[None], lambda x: masked_normalize(x, M)):
        for clean, after in zip(run(f, X, False), run(f, dirty, False), strict=True):
            np.testing.assert_array_equal(clean, after)


def test_c24_whitening_a_constant_gives_exactly_zero() -> None:
    plain, masked = jax.jit(normalize), jax.jit(masked_normalize)
    for size in (1, 3, 64):
        ones = np.ones(size, np.float32)
        for value in (0.0, 0.1, 0.7, 1 / 3, -2.3, 1e6, 1e-9):
            x = np.full(size, value, np.float32)
            assert not np.asarray(plain(x)).any()
            assert not np.asarray(masked(x, ones)).any()
    for f in (plain, lambda x: masked(x, ones)):
        assert not np.asarray(jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(x)).any()
    assert not np.asarray(masked_normalize(X, np.zeros_like(M))).any()


def test_small_values_are_no_constant() -> None:
    np.testing.assert_allclose(normalize(jnp.array([1e-3, -1e-3])), [1, -1], rtol=1e-4)


def test_c30_results_are_float32() -> None:
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int32):
        x = jnp.array([1, 2, 4], dtype)
        for got in (normalize(x), masked_normalize(x, jnp.ones(3)), masked_mean(x, jnp.ones(3))):
            assert got.dtype == jnp.float32
    assert float(masked_mean(jnp.full(300, 1, jnp.bfloat16), jnp.ones(300, jnp.bfloat16))) == 1.0
