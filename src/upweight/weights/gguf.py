"""Tensors of a GGUF file in the Hugging Face layout.

Invariants
- Names, shapes and the order of rows are those of the model's safetensors; values are float32.
- A tensor whose name is not known is refused: an ignored weight would give plausible nonsense.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from upweight.errors import ModelError, UnsupportedModel
from upweight.tokenizer.gguf_header import TensorPlace, read_header
from upweight.weights.gguf_config import GEMMAS, architecture_of, config_of, head_counts, read_gguf_config

__all__ = ["hugging_face_name", "read_gguf_config", "read_gguf_tensors"]

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Where outputs are normalised too, the norm before the MLP has another name in the model's safetensors.
_POST_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYERED = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)\Z")


def read_gguf_tensors(path: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, float32 array) of every tensor, in the order of the file; one is in memory at a time.

    Raises `UnsupportedModel` for unknown architectures, tensors and storage types, `ModelError` for a cut-off file.
    """
    header = read_header(path)
    architecture = architecture_of(header)
    config_of(header)  # refuses what the config cannot say
    heads, kv_heads = head_counts(header, architecture)
    # llama.cpp rotates neighbouring pairs in models of this architecture, so its q and k rows are interleaved.
    interleaved = {"attn_q": heads, "attn_k": kv_heads} if architecture == "llama" else {}
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for place in header.tensors:
        array = _float32(data, place)
        layered = _LAYERED.match(place.name)
        if layered and layered[2] in interleaved:
            array = _half_split(array, interleaved[layered[2]])
        if architecture in GEMMAS and place.name.endswith("norm.weight"):
            array -= 1.0  # files hold what a norm multiplies by, safetensors its difference from 1
        yield hugging_face_name(place.name, architecture), array


def hugging_face_name(name: str, architecture: str = "llama") -> str:
    """`blk.0.attn_q.weight` → `model.layers.0.self_attn.q_proj.weight`."""
    inner = _INNER | _POST_NORMS if architecture in GEMMAS else _INNER
    stem, _, ending = name.rpartition(".")
    if stem in _OUTER and ending in ("weight", "bias"):
        return f"{_OUTER[stem]}.{ending}"
    layered = _LAYERED.match(name)
    if layered is None or layered[2] not in inner:
        raise UnsupportedModel(f"GGUF tensor {name} is not known: use the model's safetensors")
    return f"model.layers.{layered[1]}.{inner[layered[2]]}.{layered[3]}"


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (pair, half) order, as interleaved RoPE wants them, to (half, pair) order."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _float32(data: np.ndarray, place: TensorPlace) -> np.ndarray:
    """The dequantised tensor; GGUF dims are fastest first, so the array's shape is their reverse."""
    try:
        kind = gguf.GGMLQuantizationType(place.ggml_type)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise UnsupportedModel(f"GGUF tensor {place.name} has the unknown storage type {place.ggml_type}") from None
    row_bytes, *rest = (place.dims[0] // block * block_bytes, *place.dims[:0:-1])
    end = place.offset + int(np.prod([row_bytes, *rest], dtype=np.int64))
    if end > data.size:
        raise ModelError(f"GGUF tensor {place.name} ends at byte {end}, the file has {data.size}: fetch it again")
    raw = np.asarray(data[place.offset : end]).reshape(*rest, row_bytes)
    try:
        array = gguf.quants.dequantize(raw, kind)
    except NotImplementedError:
        raise UnsupportedModel(f"GGUF tensor {place.name} is stored as {kind.name}, which cannot be read") from None
    # Unquantised tensors come as views of the file; the caller gets memory of its own.
    return np.array(array, dtype=np.float32) if np.may_share_memory(array, data) else array
