"""The arithmetic of one decoder, as functions of plain parameter trees.

A parameter tree is `{"embed": [V,H], "norm": [H], "layers": [layer, …], "head": [V,H] when untied}`; a layer is
`{"qkv": [H,(Nq+2Nk)D], "o": [NqD,H], "gate_up": [H,2I], "down": [I,H], "norm_in": [H], "norm_mlp": [H]}`, plus
`"qkv_bias"`, `"norm_q"`, `"norm_k"` where the family has them. Projections are stored as [in, out]; q, k, v and gate, up lie
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
"""(q [B,T,N,D], k [B,T,K,D], v [B,T,K,D]) → [B,T,N,D]; what is looked at is the caller's choice."""


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) · weight, in float32 (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


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


def rope_angles(config: DecoderConfig, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each [B,T,1,D/2], float32."""
    angles = positions_BT[..., None].astype(jnp.float32) * rope_frequencies(config.rope, config.head_dim)
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
    angles: tuple[jax.Array, jax.Array],
    attend: Attend,
    lora: Params | None = None,
    lora_scale: float = 1.0,
) -> jax.Array:
    """One block, x [B,T,H] → [B,T,H]."""
    adapter = lora or {}
    rows, length, _ = x.shape
    fused = linear(rms_norm(x, layer["norm_in"], config.norm_eps), layer["qkv"], adapter.get("qkv"), lora_scale)
    if config.qkv_bias:
        fused = fused + layer["qkv_bias"]
    q, k, v = jnp.split(fused, [config.q_size, config.q_size + config.kv_size], axis=-1)
    q = q.reshape(rows, length, config.num_heads, config.head_dim)
    k = k.reshape(rows, length, config.num_kv_heads, config.head_dim)
    v = v.reshape(rows, length, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q = rms_norm(q, layer["norm_q"], config.norm_eps)
        k = rms_norm(k, layer["norm_k"], config.norm_eps)
    mixed = attend(rotate(q, *angles), rotate(k, *angles), v).reshape(rows, length, config.q_size)
    x = x + linear(mixed, layer["o"], adapter.get("o"), lora_scale)
    gate, up = jnp.split(
        linear(rms_norm(x, layer["norm_mlp"], config.norm_eps), layer["gate_up"], adapter.get("gate_up"), lora_scale),
        2,
        axis=-1,
    )
    return x + linear(jax.nn.silu(gate) * up, layer["down"], adapter.get("down"), lora_scale)


def attend_dense(q: jax.Array, k: jax.Array, v: jax.Array, allowed_BTS: jax.Array) -> jax.Array:
    """Softmax attention over S keys where `allowed`; q [B,T,N,D], k and v [B,S,K,D] → [B,T,N,D].

    Scores and softmax are float32. A query that may look at nothing gives finite values (it is padding).
    """
    rows, length, heads, size = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32) * size**-0.5
    scores = jnp.where(allowed_BTS[:, None, None, :, :], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(rows, length, heads, size)


def head_matrix(params: Params) -> jax.Array:
    """[V,H] output head; the embedding when tied."""
    return params["head"] if "head" in params else params["embed"]


def logits_of(params: Params, hidden: jax.Array) -> jax.Array:
    """[…,H] → float32 logits […,V]."""
    return jnp.einsum("...h,vh->...v", hidden, head_matrix(params), preferred_element_type=jnp.float32)
