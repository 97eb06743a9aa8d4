"""The value head of PPO: V(s) = h·w + b on the decoder's last hidden state h of the state s.

The head reads the hidden states and does not change them: its loss has no gradient for the policy's parameters, so what the
policy learns is the policy loss alone. It starts at 0 everywhere. Engines never see it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from upweight.models.layers import Params


def init_critic(hidden_size: int) -> Params:
    """float32 zeros: V = 0, so that the first advantages are the returns themselves."""
    return {"w": jnp.zeros(hidden_size, jnp.float32), "b": jnp.zeros((), jnp.float32)}


def values_of(critic: Params, hidden_NH: jax.Array) -> jax.Array:
    """float32 [N]."""
    hidden = jax.lax.stop_gradient(hidden_NH).astype(jnp.float32)
    return hidden @ critic["w"] + critic["b"]
