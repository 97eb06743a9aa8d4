"""Losses on pairs of answers. One signature: (margin [B], settings) → [B] float32.

The margin is how much more the policy prefers the chosen answer than the reference does:
[s_π(w) − s_ref(w)] − [s_π(l) − s_ref(l)], s a score of a whole answer. The table is at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    beta: float = 0.1
    smoothing: float = 0.0  # ε: share of pairs whose label is believed to be wrong
    gamma: float = 0.5  # target margin of simpo


def sigmoid(margin: jax.Array, settings: PairSettings) -> jax.Array:
    """−(1−ε) log σ(x) − ε log σ(−x), x = β·margin (DPO, Rafailov et al. 2023; ε > 0: conservative DPO)."""
    x, share = settings.beta * margin, settings.smoothing
    return -(1 - share) * jax.nn.log_sigmoid(x) - share * jax.nn.log_sigmoid(-x)


def robust(margin: jax.Array, settings: PairSettings) -> jax.Array:
    """[−(1−ε) log σ(x) + ε log σ(−x)] / (1 − 2ε): unbiased under wrong labels (Chowdhury et al. 2024)."""
    x, share = settings.beta * margin, settings.smoothing
    return (-(1 - share) * jax.nn.log_sigmoid(x) + share * jax.nn.log_sigmoid(-x)) / (1 - 2 * share)


def hinge(margin: jax.Array, settings: PairSettings) -> jax.Array:
    """max(0, 1 − x) (SLiC, Zhao et al. 2023)."""
    return jnp.maximum(0.0, 1.0 - settings.beta * margin)


def ipo(margin: jax.Array, settings: PairSettings) -> jax.Array:
    """(margin − 1/(2β))² (Azar et al. 2023), for scores that are means."""
    return jnp.square(margin - 1.0 / (2.0 * settings.beta))


def simpo(margin: jax.Array, settings: PairSettings) -> jax.Array:
    """−log σ(x − γ) (Meng et al. 2024), for scores that are means, without a reference."""
    return -jax.nn.log_sigmoid(settings.beta * margin - settings.gamma)


PAIR_LOSSES: dict[str, Callable[[jax.Array, PairSettings], jax.Array]] = {
    "sigmoid": sigmoid,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
}
MEAN_SCORES = ("ipo", "simpo")  # what their scores are means of: the answer's tokens
