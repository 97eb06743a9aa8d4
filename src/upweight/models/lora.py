"""Low-rank adapters (Hu et al. 2021) as a tree beside the parameters; the base is never changed.

`adapter = {"layers": [{"qkv": {"a": [in,r], "b": [r,out]}, …}, …]}`. b starts at 0, so a fresh adapter changes nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from upweight.errors import ConfigError
from upweight.models.config import DecoderConfig
from upweight.models.decoder import layer_shapes
from upweight.models.layers import Params

TARGETS: dict[str, tuple[str, ...]] = {
    "all-linear": ("qkv", "o", "gate_up", "down"),
    "attention": ("qkv", "o"),
    "mlp": ("gate_up", "down"),
}


def init_adapter(config: DecoderConfig, key: jax.Array, *, rank: int, targets: str = "all-linear") -> Params:
    """a uniform in ±1/√in, b zero; float32. `ConfigError` for targets not in `TARGETS` and a rank beyond all."""
    if targets not in TARGETS:
        raise ConfigError(f"lora.targets {targets!r} is not known; known: {', '.join(TARGETS)}")
    shapes = {name: shape for name, shape in layer_shapes(config).items() if name in TARGETS[targets]}
    if rank > (most := max(map(min, shapes.values()))):
        raise ConfigError(f"lora.rank = {rank} is more than any matrix of this model has ({most}); use a smaller one")

    def one(key: jax.Array, rows: int, columns: int) -> Params:
        bound = rows**-0.5
        return {
            "a": jax.random.uniform(key, (rows, rank), jnp.float32, -bound, bound),
            "b": jnp.zeros((rank, columns), jnp.float32),
        }

    layers = []
    for layer_key in jax.random.split(key, config.num_layers):
        keys = jax.random.split(layer_key, len(shapes))
        layers.append({name: one(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)})
    return {"layers": layers}


@jax.jit
def merge(params: Params, adapter: Params, scale: float) -> Params:
    """The parameters that a plain forward pass needs to act as base + adapter: W + scale·a b, in W's dtype."""
    layers = []
    for layer, low in zip(params["layers"], adapter["layers"], strict=True):
        merged = {name: _merged(layer[name], pair, scale) for name, pair in low.items()}
        layers.append({**layer, **merged})
    return {**params, "layers": layers}


def _merged(weight: jax.Array, pair: Params, scale: float) -> jax.Array:
    return (weight + scale * (pair["a"] @ pair["b"])).astype(weight.dtype)
