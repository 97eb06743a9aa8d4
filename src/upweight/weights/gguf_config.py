"""The metadata of a GGUF file as a Hugging Face config.

Invariants
- What the file asks for and the config cannot say is refused, never dropped: wrong scaling gives plausible nonsense.
"""

from pathlib import Path
from typing import Any

from upweight.errors import ModelError, UnsupportedModel
from upweight.tokenizer.gguf_header import GgufHeader, read_header

# general.architecture → (model_type, class) of config.json
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
GEMMAS = ("gemma2", "gemma3")
# Files do not say how the largest model of each family scales its queries; the number of its layers tells it.
_LARGEST = {"gemma2": 46, "gemma3": 62}


def read_gguf_config(path: str | Path) -> dict[str, Any]:
    """Entries of config.json (model_type, hidden_size, …) for the GGUF file at `path`.

    Raises `UnsupportedModel` for architectures and scalings that are not known.
    """
    return config_of(read_header(path))


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The same from a header that was already read."""
    architecture = architecture_of(header)
    model_type, name_of_class = ARCHITECTURES[architecture]
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if "rope_freqs.weight" in tensors:
        raise UnsupportedModel(f"{header.path} scales RoPE by a table (rope_freqs): use the model's safetensors")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{header.path} has no tensor token_embd.weight")
    metadata = header.metadata
    config = {
        "architectures": [name_of_class],
        "model_type": model_type,
        "vocab_size": tensors["token_embd.weight"].dims[1],
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        **_sizes(header, architecture),
        **_rope(header, architecture),
    }
    if architecture in GEMMAS:
        config |= _gemma(header, architecture, config)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if model_type == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return config


def architecture_of(header: GgufHeader) -> str:
    """The value of general.architecture, when it is one that can be read."""
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"general.architecture is {name!r} in {header.path}: {', '.join(ARCHITECTURES)} can be read"
        )
    if header.metadata.get(f"{name}.expert_count"):
        raise UnsupportedModel(f"{header.path} is a mixture of experts: only dense models can be read")
    return name


def head_counts(header: GgufHeader, architecture: str) -> tuple[int, int]:
    """(query heads, key/value heads) of every layer."""
    heads = _number(header, f"{architecture}.attention.head_count")
    return heads, _number(header, f"{architecture}.attention.head_count_kv", heads)


def _sizes(header: GgufHeader, architecture: str) -> dict[str, Any]:
    heads, kv_heads = head_counts(header, architecture)
    hidden = _number(header, f"{architecture}.embedding_length")
    head_dim = _number(header, f"{architecture}.attention.key_length", hidden // heads)
    rotated = _number(header, f"{architecture}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModel(f"{header.path} rotates {rotated} of {head_dim} dimensions of a head: all are needed")
    epsilon = _number(header, f"{architecture}.attention.layer_norm_rms_epsilon")
    return {
        "hidden_size": hidden,
        "intermediate_size": _number(header, f"{architecture}.feed_forward_length"),
        "num_hidden_layers": _number(header, f"{architecture}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _number(header, f"{architecture}.context_length"),
        "rms_norm_eps": _short(epsilon),
    }


def _gemma(header: GgufHeader, architecture: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """What only these families have. In gemma3 the scaling of RoPE is that of the layers without a window."""
    largest = sizes["num_hidden_layers"] == _LARGEST[architecture]
    entries = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _number(header, f"{architecture}.attention.sliding_window"),
        "query_pre_attn_scalar": sizes["hidden_size"] // sizes["num_attention_heads"] if largest else sizes["head_dim"],
    }
    pattern = header.metadata.get(f"{architecture}.attention.sliding_window_pattern")
    if pattern is not None:
        entries["layer_types"] = _layer_types(pattern, sizes["num_hidden_layers"])
    if architecture == "gemma3":
        return entries | {"rope_local_base_freq": _short(_number(header, "gemma3.rope.freq_base_swa", 10000.0))}
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return entries | {name: _short(_number(header, f"gemma2.{name}", usual)) for name, usual in caps.items()}


def _layer_types(pattern: Any, layers: int) -> list[str]:
    """From one flag a layer (True = window), or from n: every n-th layer sees the whole past."""
    slides = pattern if isinstance(pattern, list) else [(layer + 1) % int(pattern) != 0 for layer in range(layers)]
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _rope(header: GgufHeader, architecture: str) -> dict[str, Any]:
    kind = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{architecture}.rope.scaling.type is {kind!r} in {header.path}: none and linear are read"
        )
    scaling = None
    if kind == "linear":
        scaling = {"rope_type": "linear", "factor": _short(_number(header, f"{architecture}.rope.scaling.factor"))}
    return {"rope_theta": _short(_number(header, f"{architecture}.rope.freq_base", 10000.0)), "rope_scaling": scaling}


def _number(header: GgufHeader, name: str, default: float | None = None) -> Any:
    value = header.metadata.get(name, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedModel(f"{name} is {value!r} in {header.path}: one number for all layers is needed")
    return value


def _short(value: float) -> float:
    """A float32 as the decimal that was meant: 9.999999747378752e-06 is 1e-05."""
    return float(f"{value:.7g}")
