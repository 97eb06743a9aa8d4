"""The arithmetic of one decoder, as functions of plain parameter trees.

A parameter tree is `{"embed": [V,H], "norm": [H], "layers": [layer, …], "head": [V,H] when untied}`; a layer is
`{"qkv": [H,(Nq+2Nk)D], "o": [NqD,H], "gate_up": [H,2I], "down": [I,H], "norm_in": [H], "norm_mlp": [H]}`, plus
`"qkv_bias"`, `"norm_q"`, `"norm_k"`, `"norm_attn_out"`, `"norm_mlp_out"` where the family has them. Projections are stored as [in, out]; q, k, v and gate, up lie
side by side in one matrix, so that trainer and engine each make one product of them.
A LoRA tree is `{"layers": [{"qkv": {"a": [in,r], "b": [r,out]}, …}, …]}`; it adds scale·(x a) b to a product.

Axes: B rows, T tokens, H hidden, N heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from upweight.models.config import DecoderConfig, RopeConfig

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q [B,T,N,D], k [B,T,K,D], v [B,T,K,D]) → [B,T,N,D]; what is looked at is the caller's choice.

Scores are q·k/√D; a family with another scale has it in q already. `config.attn_softcap` is the caller's to apply.
"""

Angles = tuple[jax.Array, jax.Array]
"""cos and sin, each [B,T,1,D/2], float32."""


def embed(config: DecoderConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Ids → [.., H], what the first layer takes."""
    x = params["embed"][tokens]
    return x if config.embed_scale == 1.0 else x * jnp.asarray(config.embed_scale, x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """x / rms(x) · (offset + weight), in float32 (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    factor = weight.astype(jnp.float32) + offset if offset else weight.astype(jnp.float32)
    return (x32 * scale * factor).astype(x.dtype)


def final_norm(config: DecoderConfig, params: Params, x: jax.Array) -> jax.Array:
    """The norm between the last layer and the head."""
    return rms_norm(x, params["norm"], config.norm_eps, config.norm_offset)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> jax.Array:
    """[D/2] inverse wavelengths; `llama3` stretches long waves, keeps short ones and blends between."""
    freq = 1.0 / rope.theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_context * freq / (2 * jnp.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = jnp.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
        return freq / rope.factor * (1 - keep) + freq * keep
    return freq


def rope_angles(config: DecoderConfig, positions_BT: jax.Array) -> tuple[Angles, Angles]:
    """(of layers that see the whole past, of layers with a window); `layer_angles` picks."""
    whole = _angles(config.rope, config.head_dim, positions_BT)
    return whole, whole if config.rope_local is None else _angles(config.rope_local, config.head_dim, positions_BT)


def layer_angles(config: DecoderConfig, angles: tuple[Angles, Angles], window: jax.Array | int) -> Angles:
    """The angles of a layer with this window (0 = none)."""
    whole, local = angles
    if config.rope_local is None:
        return whole
    if isinstance(window, int):
        return local if window else whole
    return jnp.where(window > 0, local[0], whole[0]), jnp.where(window > 0, local[1], whole[1])


def _angles(rope: RopeConfig, head_dim: int, positions_BT: jax.Array) -> Angles:
    angles = positions_BT[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    return jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding on halves (Su et al. 2021, in the layout of Hugging Face checkpoints); x [B,T,N,D]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def linear(x: jax.Array, weight: jax.Array, lora: dict[str, jax.Array] | None, scale: float) -> jax.Array:
    y = x @ weight
    if lora is None:
        return y
    return y + (((x @ lora["a"]) @ lora["b"]) * scale).astype(y.dtype)


def decoder_layer(
    config: DecoderConfig,
    layer: Params,
    x: jax.Array,
    angles: Angles,
    attend: Attend,
    lora: Params | None = None,
    lora_scale: float = 1.0,
) -> jax.Array:
    """One block, x [B,T,H] → [B,T,H]."""
    adapter = lora or {}

    def norm(y: jax.Array, name: str) -> jax.Array:
        return rms_norm(y, layer[name], config.norm_eps, config.norm_offset)

    def product(y: jax.Array, name: str) -> jax.Array:
        return linear(y, layer[name], adapter.get(name), lora_scale)

    mixed = product(_attention(config, layer, product(norm(x, "norm_in"), "qkv"), angles, attend), "o")
    x = x + (norm(mixed, "norm_attn_out") if config.post_norms else mixed)
    gate, up = jnp.split(product(norm(x, "norm_mlp"), "gate_up"), 2, axis=-1)
    out = product(activation(config, gate) * up, "down")
    return x + (norm(out, "norm_mlp_out") if config.post_norms else out)


def _attention(config: DecoderConfig, layer: Params, fused: jax.Array, angles: Angles, attend: Attend) -> jax.Array:
    """[B,T,(N+2K)D] queries, keys and values side by side → [B,T,ND]."""
    rows, length, _ = fused.shape
    if config.qkv_bias:
        fused = fused + layer["qkv_bias"]
    q, k, v = jnp.split(fused, [config.q_size, config.q_size + config.kv_size], axis=-1)
    q = q.reshape(rows, length, config.num_heads, config.head_dim)
    k = k.reshape(rows, length, config.num_kv_heads, config.head_dim)
    v = v.reshape(rows, length, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q = rms_norm(q, layer["norm_q"], config.norm_eps, config.norm_offset)
        k = rms_norm(k, layer["norm_k"], config.norm_eps, config.norm_offset)
    q, k = rotate(q, *angles), rotate(k, *angles)
    if config.query_scale is not None:
        q = q * jnp.asarray(config.query_scale * config.head_dim**0.5, q.dtype)
    return attend(q, k, v).reshape(rows, length, config.q_size)


def activation(config: DecoderConfig, gate: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) if config.activation == "gelu_tanh" else jax.nn.silu(gate)


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """cap·tanh(x / cap); x itself when the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def attend_dense(q: jax.Array, k: jax.Array, v: jax.Array, allowed_BTS: jax.Array, cap: float = 0.0) -> jax.Array:
    """Softmax attention over S keys where `allowed`; q [B,T,N,D], k and v [B,S,K,D] → [B,T,N,D].

    Scores and softmax are float32; `cap` bends scores as `config.attn_softcap` says. A query that may look at nothing gives
    finite values (it is padding).
    """
    rows, length, heads, size = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32) * size**-0.5
    scores = jnp.where(allowed_BTS[:, None, None, :, :], softcap(scores, cap), -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(rows, length, heads, size)


def head_matrix(params: Params) -> jax.Array:
    """[V,H] output head; the embedding when tied."""
    return params["head"] if "head" in params else params["embed"]


def logits_of(config: DecoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """[…,H] → float32 logits […,V]."""
    logits = jnp.einsum("...h,vh->...v", hidden, head_matrix(params), preferred_element_type=jnp.float32)
    return softcap(logits, config.final_softcap)
