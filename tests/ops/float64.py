"""Independent references: slopes of float64 functions, and JAX functions run with and without jit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

POISON = [np.nan, np.inf, -np.inf, -1e4]


def slope(f: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    """Central differences of a scalar function, in the shape of `at`."""
    at = at.astype(np.float64)
    out = np.zeros(at.size)
    for i in range(at.size):
        step = np.zeros(at.size)
        step[i] = 1e-6
        step = step.reshape(at.shape)
        out[i] = (f(at + step) - f(at - step)) / 2e-6
    return out.reshape(at.shape)


def weights(shape: tuple[int, ...]) -> np.ndarray:
    """Different for every place, so that a value in the wrong place shows."""
    return (1 + np.arange(int(np.prod(shape))) / 10).reshape(shape)


def run(f: Callable[[jax.Array], Any], x: np.ndarray, jit: bool) -> tuple[np.ndarray, np.ndarray]:
    """Values of f, and the gradient of their weighted sum."""

    def total(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = f(x)
        return jnp.sum(values * weights(values.shape)), values

    both = jax.grad(total, has_aux=True)
    gradient, values = (jax.jit(both) if jit else both)(jnp.asarray(x))
    return np.asarray(values), np.asarray(gradient)


def check(
    f: Callable[[jax.Array], Any], reference: Callable[[np.ndarray], np.ndarray], x: np.ndarray, *, eager: bool = False
) -> None:
    """f equals the float64 reference in value and slope, compiled, and with `eager` operation by operation as well."""
    want = np.asarray(reference(x.astype(np.float64)))
    want_slope = slope(lambda x: float((reference(x) * weights(want.shape)).sum()), x)
    for jit in (False, True) if eager else (True,):
        values, gradient = run(f, x, jit)
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, want, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(gradient, want_slope, rtol=2e-4, atol=2e-5)
