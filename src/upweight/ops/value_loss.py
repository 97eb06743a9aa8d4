"""Losses of a value function, per token: (values, returns, old values, limit) → float32 of their shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def squared_error(
    values: jax.Array, returns: jax.Array, old: jax.Array | None = None, limit: float | None = None
) -> jax.Array:
    """(V − R)², not halved; with a limit δ the greater of it and ((V clipped to V_old ± δ) − R)² (Schulman et al. 2017)."""
    plain = jnp.square(values - returns)
    if limit is None or old is None:
        return plain
    near = old + jnp.clip(values - old, -limit, limit)
    return jnp.maximum(plain, jnp.square(near - returns))


def moments_of(values: jax.Array, returns: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What `explained_variance` takes the means of: R, R², R − V, (R − V)²."""
    error = returns - values
    return returns, jnp.square(returns), error, jnp.square(error)


def explained_variance(ret: Any, ret_squared: Any, error: Any, error_squared: Any) -> Any:
    """1 − Var(R − V)/Var(R) from the means of R, R², R − V, (R − V)², numbers or arrays; NaN where R has no variance."""
    total = ret_squared - ret * ret
    left = error_squared - error * error
    defined = total > 1e-6 * ret_squared  # below that the difference is rounding
    return jnp.where(defined, 1.0 - left / jnp.where(defined, total, 1.0), jnp.nan)
