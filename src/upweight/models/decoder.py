"""A decoder as a Flax NNX module; the arithmetic is in `layers`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from upweight.models.config import DecoderConfig
from upweight.models.layers import (
    Params,
    attend_dense,
    decoder_layer,
    embed,
    final_norm,
    layer_angles,
    logits_of,
    rope_angles,
)

REMAT_TOKENS = 2048  # above this many, a gradient trades a second forward pass of each layer for its activations


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of one layer's parameters, in stored order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "norm_in": (hidden,),
        "qkv": (hidden, config.q_size + 2 * config.kv_size),
        "o": (config.q_size, hidden),
        "norm_mlp": (hidden,),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }
    if config.qkv_bias:
        shapes["qkv_bias"] = (config.q_size + 2 * config.kv_size,)
    if config.qk_norm:
        shapes |= {"norm_q": (config.head_dim,), "norm_k": (config.head_dim,)}
    if config.post_norms:
        shapes |= {"norm_attn_out": (hidden,), "norm_mlp_out": (hidden,)}
    return shapes


def model_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of the parameters outside the layers."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, config.hidden_size),
        "norm": (config.hidden_size,),
    }
    if not config.tied:
        shapes["head"] = (config.vocab_size, config.hidden_size)
    return shapes


def random_params(config: DecoderConfig, key: jax.Array, scale: float = 0.02) -> Params:
    """A fresh parameter tree: normal weights of the given standard deviation, norms that multiply by 1, biases 0."""

    def fresh(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        if name.startswith("norm"):
            return jnp.full(shape, 1.0 - config.norm_offset, jnp.float32)
        if name.endswith("bias"):
            return jnp.zeros(shape, jnp.float32)
        return scale * jax.random.normal(key, shape, jnp.float32)

    def several(shapes: dict[str, tuple[int, ...]], key: jax.Array) -> Params:
        keys = jax.random.split(key, len(shapes))
        return {name: fresh(name, shape, k) for (name, shape), k in zip(shapes.items(), keys, strict=True)}

    outer, *inner = jax.random.split(key, config.num_layers + 1)
    return several(model_shapes(config), outer) | {"layers": [several(layer_shapes(config), k) for k in inner]}


class DecoderLayer(nnx.Module):
    """Parameters of one block, named as in `layer_shapes`."""

    def __init__(self, params: Params) -> None:
        for name, array in params.items():
            setattr(self, name, nnx.Param(array))


class Decoder(nnx.Module):
    """Decoder-only transformer: `model(tokens_BT)` → float32 logits [B,T,V].

    `hidden_states` and `head` are its two halves, for callers that need logits at few positions only.
    """

    def __init__(self, config: DecoderConfig, params: Params) -> None:
        self.config = config
        self.embed = nnx.Param(params["embed"])
        self.norm = nnx.Param(params["norm"])
        if not config.tied:
            self.output = nnx.Param(params["head"])
        self.layers = nnx.List([DecoderLayer(layer) for layer in params["layers"]])

    def params(self) -> Params:
        """The parameter tree of `layers`, sharing this module's arrays."""
        tree: dict[str, Any] = {"embed": self.embed[...], "norm": self.norm[...]}
        if not self.config.tied:
            tree["head"] = self.output[...]
        names = layer_shapes(self.config)
        tree["layers"] = [{name: getattr(layer, name)[...] for name in names} for layer in self.layers]
        return tree

    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        return self.head(self.hidden_states(tokens, positions))

    def hidden_states(
        self, tokens: jax.Array, positions: jax.Array | None = None, allowed: jax.Array | None = None
    ) -> jax.Array:
        """[B,T] ids (padding on the right) → [B,T,H] after the last norm; positions default to 0, 1, 2, …

        `allowed` [B,T,T] says which keys a query may look at, by default those whose position is not after its own.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        allowed = causal_mask(positions) if allowed is None else allowed
        remat = tokens.size > REMAT_TOKENS
        return forward_hidden(self.config, self.params(), tokens, positions, allowed, remat=remat)

    def head(self, hidden: jax.Array) -> jax.Array:
        return logits_of(self.config, self.params(), hidden)


def causal_mask(positions_BT: jax.Array) -> jax.Array:
    """[B,T,T] True where the query's position is not before the key's."""
    return positions_BT[:, :, None] >= positions_BT[:, None, :]


def within_window(allowed: jax.Array, query_pos: jax.Array, key_pos: jax.Array, window: jax.Array | int) -> jax.Array:
    """Narrows `allowed` [B,T,S] to keys less than `window` positions back; window 0 leaves it as it is."""
    near = query_pos[:, :, None] - key_pos[:, None, :] < window
    return allowed & (near | (jnp.asarray(window) == 0))


def forward_hidden(
    config: DecoderConfig,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    allowed_BTT: jax.Array,
    lora: Params | None = None,
    lora_scale: float = 1.0,
    remat: bool = False,
) -> jax.Array:
    """[B,T,H] after the last norm, each query looking at the keys that `allowed_BTT` and the layer's window grant.

    Layers run in a scan over stacked parameters: one layer is compiled, whatever the depth.
    """
    angles = rope_angles(config, positions_BT)
    windows = jnp.asarray(config.windows or (0,) * config.num_layers, jnp.int32)

    def block(x: jax.Array, inputs: tuple[Params, Params | None, jax.Array]) -> tuple[jax.Array, None]:
        layer, adapter, window = inputs
        mask = within_window(allowed_BTT, positions_BT, positions_BT, window) if any(config.windows) else allowed_BTT

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend_dense(q, k, v, mask, config.attn_softcap)

        turns = layer_angles(config, angles, window)
        return decoder_layer(config, layer, x, turns, attend, adapter, lora_scale), None

    body = jax.checkpoint(block, prevent_cse=False) if remat else block
    stacked = params["layers"] if isinstance(params["layers"], dict) else stack_layers(params["layers"])
    adapters = stack_layers(lora["layers"]) if lora is not None else None
    x = embed(config, params, tokens_BT)
    x, _ = jax.lax.scan(body, x, (stacked, adapters, windows))
    return final_norm(config, params, x)


def stack_layers(layers: list[Params]) -> Params:
    """A list of equal trees → one tree of arrays with a leading layer axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
