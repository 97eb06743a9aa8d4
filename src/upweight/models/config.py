"""What a decoder looks like, read from a Hugging Face style config (transformers 4 or 5 spelling)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upweight.errors import UnsupportedModel

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and how its frequencies are stretched."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder-only transformer; hashable, so that it can be static under `jax.jit`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()  # per layer; 0 = the whole past

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Parameters, a tied head counted once."""
        per_layer = self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate_size)
        heads = 1 if self.tied else 2
        return self.num_layers * per_layer + heads * self.vocab_size * self.hidden_size

    @classmethod
    def from_huggingface(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Raises `UnsupportedModel` naming what is not known."""
        kind = str(raw.get("model_type"))
        if kind not in SUPPORTED:
            raise UnsupportedModel(f"model_type {kind!r} is not supported; supported: {', '.join(SUPPORTED)}")
        if raw.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not supported for {kind}; supported: silu")
        for flag in ("mlp_bias", "attention_bias"):
            if raw.get(flag):
                raise UnsupportedModel(f"{flag}=true is not supported for {kind}")
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        layers = int(raw["num_hidden_layers"])
        return cls(
            model_type=kind,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            max_context=int(raw["max_position_embeddings"]),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope(raw),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            windows=_windows(raw, kind, layers),
        )


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(found.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=float(found["factor"]))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(found["factor"]),
        low_freq_factor=float(found["low_freq_factor"]),
        high_freq_factor=float(found["high_freq_factor"]),
        original_context=int(found["original_max_position_embeddings"]),
    )


def _windows(raw: Mapping[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    window = raw.get("sliding_window")
    if not window or (kind in ("qwen2", "qwen3") and not raw.get("use_sliding_window")) or kind == "llama":
        return (0,) * layers
    types = raw.get("layer_types")
    if types:
        return tuple(int(window) if t == "sliding_attention" else 0 for t in types)
    first = int(raw.get("max_window_layers", 0)) if kind != "mistral" else 0
    return tuple(int(window) if i >= first else 0 for i in range(layers))
