"""Hugging Face tensor names ↔ the parameter tree of `upweight.models.layers`.

Hugging Face stores projections as [out, in] and q, k, v, gate, up apart; the tree stores [in, out] and fuses them.
Fusing and splitting move values without touching them, so a round trip is bit-equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np

from upweight.errors import ModelError
from upweight.models.config import DecoderConfig
from upweight.models.decoder import layer_shapes, model_shapes
from upweight.models.layers import Params

_OUTER = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_INNER = {
    "norm_in": ["input_layernorm.weight"],
    "qkv": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "qkv_bias": ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"],
    "norm_q": ["self_attn.q_norm.weight"],
    "norm_k": ["self_attn.k_norm.weight"],
    "o": ["self_attn.o_proj.weight"],
    "norm_mlp": ["post_attention_layernorm.weight"],
    "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down": ["mlp.down_proj.weight"],
}
# Families that normalise the outputs too have four norms a layer, and another meaning of the second name.
_POST_NORMS = {
    "norm_attn_out": ["post_attention_layernorm.weight"],
    "norm_mlp": ["pre_feedforward_layernorm.weight"],
    "norm_mlp_out": ["post_feedforward_layernorm.weight"],
}
_IGNORED = ("rotary_emb.inv_freq",)


def _names(config: DecoderConfig) -> dict[str, list[str]]:
    """Key of a layer → the tensors it is made of, without `model.layers.N.`."""
    return _INNER | _POST_NORMS if config.post_norms else _INNER


def params_from_tensors(
    config: DecoderConfig, tensors: Iterable[tuple[str, np.ndarray]], dtype: jnp.dtype | None = jnp.float32
) -> Params:
    """Builds the tree; `dtype` None keeps each tensor's own.

    Raises `ModelError` naming a tensor that is missing, unknown or of another shape than the config says.
    """
    found = {name: array for name, array in tensors if not name.endswith(_IGNORED)}
    if config.tied:
        found.pop("lm_head.weight", None)

    def build(names: list[str], key: str, shape: tuple[int, ...]) -> jnp.ndarray:
        parts = []
        for name in names:
            if name not in found:
                raise ModelError(f"tensor {name} is missing from the checkpoint")
            part = found.pop(name)
            parts.append(part.T if part.ndim == 2 and key not in _OUTER else part)
        whole = np.concatenate(parts, axis=-1) if len(parts) > 1 else np.ascontiguousarray(parts[0])
        if whole.shape != shape:
            raise ModelError(f"tensor {names[0]} gives {key} of shape {whole.shape}; the config says {shape}")
        return jnp.asarray(whole, dtype or whole.dtype)

    tree: Params = {key: build([_OUTER[key]], key, shape) for key, shape in model_shapes(config).items()}
    inner = _names(config)
    tree["layers"] = [
        {key: build([f"model.layers.{i}.{n}" for n in inner[key]], key, s) for key, s in layer_shapes(config).items()}
        for i in range(config.num_layers)
    ]
    if found:
        raise ModelError(f"tensor {sorted(found)[0]} is not part of a {config.model_type} model ({len(found)} unknown)")
    return tree


def tensors_from_params(config: DecoderConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """The inverse, one tensor at a time, so that a large model is never held twice."""
    for key in model_shapes(config):
        yield _OUTER[key], np.asarray(params[key])
    borders = {
        "qkv": [config.q_size, config.q_size + config.kv_size],
        "qkv_bias": [config.q_size, config.q_size + config.kv_size],
        "gate_up": [config.intermediate_size],
    }
    inner = _names(config)
    for i, layer in enumerate(params["layers"]):
        for key in layer_shapes(config):
            parts = np.split(np.asarray(layer[key]), borders.get(key, []), axis=-1)
            for name, part in zip(inner[key], parts, strict=True):
                yield f"model.layers.{i}.{name}", np.ascontiguousarray(part.T if part.ndim == 2 else part)
