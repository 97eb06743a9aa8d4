"""Losses of a value function, per token: (values, returns, old values, limit) → float32 of their shape."""

from __future__ import annotations

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


def explained_variance(values: jax.Array, returns: jax.Array, trained: jax.Array) -> jax.Array:
    """1 − Var(R − V)/Var(R) over trained places; NaN where the returns have no variance."""
    count = jnp.sum(trained)

    def variance(x: jax.Array) -> jax.Array:
        kept = jnp.where(trained > 0, x, 0.0)
        mean = jnp.sum(kept) / count
        return jnp.sum(jnp.where(trained > 0, jnp.square(x - mean), 0.0)) / count

    total = variance(returns)
    return jnp.where(total > 0, 1.0 - variance(returns - values) / jnp.where(total > 0, total, 1.0), jnp.nan)
