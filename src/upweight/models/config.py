"""What a decoder looks like, read from a Hugging Face style config (transformers 4 or 5 spelling)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upweight.errors import ModelError, UnsupportedModel

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
ROPE_TYPES = ("default", "linear", "llama3")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GEMMAS = ("gemma2", "gemma3_text")
_SLIDING = "sliding_attention"


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
    rope_local: RopeConfig | None = None  # of layers with a window, where it differs from `rope`
    activation: str = "silu"  # of the gate: silu or gelu_tanh
    norm_offset: float = 0.0  # a norm multiplies by this + its weight
    post_norms: bool = False  # attention's and the MLP's outputs are normalised before they are added
    embed_scale: float = 1.0
    query_scale: float | None = None  # of attention scores; None = 1/√head_dim
    attn_softcap: float = 0.0  # scores become cap·tanh(score / cap); 0 = as they are
    final_softcap: float = 0.0  # the same for logits

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
        """Raises `UnsupportedModel` naming what is not known, `ModelError` naming an entry that is missing or of a wrong kind."""
        try:
            return cls._from_entries(raw)
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"the model's config has an entry that cannot be read: {error}; fetch it again") from error

    @classmethod
    def _from_entries(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        kind = str(raw.get("model_type"))
        if kind not in SUPPORTED:
            raise UnsupportedModel(f"model_type {kind!r} is not supported; supported: {', '.join(SUPPORTED)}")
        for flag in ("mlp_bias", "attention_bias", "use_bidirectional_attention"):
            if raw.get(flag):
                raise UnsupportedModel(f"{flag}=true is not supported for {kind}")
        gemma = kind in _GEMMAS
        heads = int(_need(raw, "num_attention_heads"))
        hidden = int(_need(raw, "hidden_size"))
        layers = int(_need(raw, "num_hidden_layers"))
        rope, rope_local = _ropes(raw, kind)
        return cls(
            model_type=kind,
            vocab_size=int(_need(raw, "vocab_size")),
            hidden_size=hidden,
            intermediate_size=int(_need(raw, "intermediate_size")),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or (256 if gemma else hidden // heads)),
            max_context=int(_need(raw, "max_position_embeddings")),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=rope,
            rope_local=rope_local,
            tied=bool(raw.get("tie_word_embeddings", gemma)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind in ("qwen3", "gemma3_text"),
            windows=_windows(raw, kind, layers),
            activation=_activation(raw, kind),
            **(_gemma_entries(raw, kind, hidden) if gemma else {}),
        )


def _need(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise ModelError(f"the model's config has no {name}: fetch config.json again")
    return raw[name]


def _activation(raw: Mapping[str, Any], kind: str) -> str:
    """Gemma configs name it `hidden_activation`; beside it, `hidden_act` is a leftover that nothing reads."""
    default = "gelu_pytorch_tanh" if kind in _GEMMAS else "silu"
    name = (raw.get("hidden_activation") if kind in _GEMMAS else raw.get("hidden_act")) or default
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {name!r} is not supported for {kind}; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _gemma_entries(raw: Mapping[str, Any], kind: str, hidden: int) -> dict[str, Any]:
    """What only these families have; an absent cap is the family's own, null is none."""
    attn_cap, final_cap = (50.0, 30.0) if kind == "gemma2" else (None, None)
    return {
        "norm_offset": 1.0,
        "post_norms": True,
        "embed_scale": float(hidden) ** 0.5,
        "query_scale": float(raw.get("query_pre_attn_scalar") or 256) ** -0.5,
        "attn_softcap": float(raw.get("attn_logit_softcapping", attn_cap) or 0.0),
        "final_softcap": float(raw.get("final_logit_softcapping", final_cap) or 0.0),
    }


def _ropes(raw: Mapping[str, Any], kind: str) -> tuple[RopeConfig, RopeConfig | None]:
    """(of all layers or those without a window, of layers with a window where it differs)."""
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    found = raw.get(name) or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"the model's config has {name} {found!r}, which is no object: fetch config.json again")
    if any(isinstance(value, Mapping) for value in found.values()):  # one entry a layer type
        whole = _rope(found.get("full_attention") or {}, raw, kind)
        local = _rope(found.get(_SLIDING) or {}, raw, kind)
    elif kind == "gemma3_text":
        whole = _rope(found, raw, kind)
        local = RopeConfig(theta=float(raw.get("rope_local_base_freq") or 10000.0))
    else:
        whole = local = _rope(found, raw, kind)
    _check_older_entry(raw, whole, kind)
    return whole, local if local != whole else None


def _check_older_entry(raw: Mapping[str, Any], whole: RopeConfig, kind: str) -> None:
    """`rope_scaling` beside `rope_parameters`, as long contexts are switched on by hand: not to be passed over."""
    older = raw.get("rope_scaling")
    if not raw.get("rope_parameters") or not older or older == raw["rope_parameters"] or not isinstance(older, Mapping):
        return
    flat = older.get("full_attention", older) or {}
    if _rope({"rope_theta": whole.theta, **flat}, raw, kind) != whole:
        raise ModelError(
            f"the model's config has rope_parameters {raw['rope_parameters']} and rope_scaling {older}, which differ: "
            "leave out the one that does not hold"
        )


def _rope(found: Mapping[str, Any], raw: Mapping[str, Any], kind: str) -> RopeConfig:
    usual = 1e6 if kind == "gemma3_text" else 1e4
    theta = float(found.get("rope_theta") or raw.get("rope_theta") or usual)
    stretch = found.get("rope_type") or found.get("type") or "default"
    if stretch not in ROPE_TYPES:
        raise UnsupportedModel(f"rope type {stretch!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    part = found.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {part} is not supported; supported: 1 (whole heads are rotated)")
    if stretch == "default":
        return RopeConfig(theta=theta)
    if stretch == "linear":
        return RopeConfig(theta=theta, kind=stretch, factor=float(_need(found, "factor")))
    return RopeConfig(
        theta=theta,
        kind=stretch,
        factor=float(_need(found, "factor")),
        low_freq_factor=float(_need(found, "low_freq_factor")),
        high_freq_factor=float(_need(found, "high_freq_factor")),
        original_context=int(_need(found, "original_max_position_embeddings")),
    )


def _windows(raw: Mapping[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    window = int(raw.get("sliding_window", 4096 if kind in _GEMMAS else 0) or 0)
    if not window or (kind in ("qwen2", "qwen3") and not raw.get("use_sliding_window")) or kind == "llama":
        return (0,) * layers
    types = raw.get("layer_types")
    if types:
        if len(types) != layers or not set(types) <= {_SLIDING, "full_attention"}:
            raise UnsupportedModel(
                f"layer_types must be {layers} of {_SLIDING}, full_attention; it has {len(types)}: {sorted(set(types))}"
            )
        return tuple(window if t == _SLIDING else 0 for t in types)
    return tuple(window if _slides(raw, kind, i) else 0 for i in range(layers))


def _slides(raw: Mapping[str, Any], kind: str, layer: int) -> bool:
    """Whether a layer has a window when the config has no `layer_types`."""
    if kind == "gemma2":
        return layer % 2 == 0
    if kind == "gemma3_text":
        pattern = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6)
        return (layer + 1) % pattern != 0
    return kind == "mistral" or layer >= int(raw.get("max_window_layers", 0))
