"""The golden checkpoints written as GGUF files by the gguf package and read back."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from upweight.weights.config import read_config
from upweight.weights.gguf import hugging_face_name, read_gguf_config, read_gguf_tensors
from upweight.weights.safetensors_files import read_tensors
from upweight.weights.source import resolve

MODELS = Path(__file__).parents[1] / "data" / "models"
_NAMES = [
    *(f"blk.0.{part}" for part in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm")),
    *(f"blk.0.{part}" for part in ("attn_k_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")),
    *("token_embd", "output_norm", "output"),
]


def gguf_name(name: str) -> str:
    """The inverse of `hugging_face_name`, for any layer."""
    parts = name.split(".")
    layer = parts[2] if parts[1] == "layers" else "0"
    table = {hugging_face_name(f"{n}.{e}"): f"{n}.{e}" for n in _NAMES for e in ("weight", "bias")}
    first = name.replace(f"layers.{layer}.", "layers.0.")
    return table[first].replace("blk.0.", f"blk.{layer}.")


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (half, pair) order to (pair, half) order, as files for llama.cpp have them."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def write(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, array in tensors.items():
        part = name.split(".")[-2]
        permuted = config["model_type"] == "llama" and part in heads
        writer.add_tensor(gguf_name(name), interleaved(array, heads[part]) if permuted else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("model", ["llama-gqa-tied", "qwen2", "qwen3"])
def test_a_checkpoint_survives_the_way_through_gguf(model: str, tmp_path: Path) -> None:
    source = resolve(str(MODELS / model))
    config = read_config(source)
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"]}
    tensors = dict(read_tensors(source.path))
    write(tmp_path / "m.gguf", config, tensors)
    read = dict(read_gguf_tensors(tmp_path / "m.gguf"))
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert np.array_equal(read[name], array), name
    again = read_gguf_config(tmp_path / "m.gguf")
    shared = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"}
    shared |= {"num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta"}
    shared |= {"tie_word_embeddings", "architectures"}
    assert {key: again[key] for key in shared} == {key: config[key] for key in shared}
    assert again["head_dim"] == config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
