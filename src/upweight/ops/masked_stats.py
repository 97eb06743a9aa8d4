"""Mean and whitening under a mask, of any rank, in float32 (JAX).

Invariants
* What a masked place holds influences neither value nor gradient.
* A constant is whitened to exactly 0: values whose spread is at most 1e-6 of their mean count as one constant.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

FLAT = 1e-6


def masked(x: jax.Array, trained: jax.Array) -> jax.Array:
    """x where trained, else 0: selected before any arithmetic, so that NaN at a masked place stays there."""
    return jnp.where(trained > 0, x, 0.0)


def masked_mean(x: jax.Array, m: jax.Array, eps: float = 1e-8) -> jax.Array:
    """Σ m x / max(Σ m, eps), float32 []."""
    weight = jnp.asarray(m, jnp.float32)
    total = jnp.sum(weight * masked(jnp.asarray(x, jnp.float32), weight))
    return total / jnp.maximum(jnp.sum(weight), eps)


def masked_normalize(x: jax.Array, m: jax.Array, eps: float = 1e-8) -> jax.Array:
    """m·(x − μ)/√(σ² + eps) with masked mean and population variance; exactly 0 for a constant. float32."""
    weight, (centered, variance, flat) = jnp.asarray(m, jnp.float32), _moments(x, m)
    return weight * jnp.where(flat, 0.0, centered / jnp.sqrt(variance + eps))


def normalize(x: jax.Array, eps: float = 1e-8) -> jax.Array:
    """(x − mean)/(population std + eps); exactly 0 for a constant. float32."""
    centered, variance, flat = _moments(x, jnp.ones(jnp.shape(x), jnp.float32))
    return jnp.where(flat, 0.0, centered / (jnp.sqrt(variance) + eps))


def _moments(x: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x − μ, 0 where masked; variance; is a constant). Of a constant the variance is given as 1, whose root has a slope."""
    weight = jnp.asarray(m, jnp.float32)
    values = masked(jnp.asarray(x, jnp.float32), weight)
    mean = masked_mean(values, weight)
    centered = masked(values - mean, weight)
    low = jnp.min(jnp.where(weight > 0, values, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(weight > 0, values, -jnp.inf), initial=-jnp.inf)
    flat = high - low <= FLAT * jnp.abs(mean)
    variance = masked_mean(centered**2, weight)
    return centered, jnp.where(flat, 1.0, variance), flat
