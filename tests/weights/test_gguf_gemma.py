"""Gemma checkpoints as GGUF files: norms are stored with their 1, names and entries are those of llama.cpp."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from upweight.models.config import DecoderConfig
from upweight.weights.gguf import read_gguf_config, read_gguf_tensors
from upweight.weights.loading import load_model, save_model
from upweight.weights.safetensors_files import read_tensors

MODELS = Path(__file__).parents[1] / "data" / "models"
ARCH = {"gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3": gguf.MODEL_ARCH.GEMMA3}


def write(path: Path, name: str, pattern: Any = None, **numbers: int) -> dict[str, Any]:
    raw = json.loads((MODELS / name / "config.v4.json").read_text())
    writer = gguf.GGUFWriter(path, name)
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_block_count(numbers.get("layers", raw["num_hidden_layers"]))
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_sliding_window(raw["sliding_window"])
    if pattern is not None:
        writer.add_sliding_window_pattern(pattern)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(rank) for rank in range(len(words))])
    writer.add_token_types([2, 3, 3, *[6] * 256, 1, 1])
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(False)
    names = gguf.get_tensor_name_map(ARCH[name], raw["num_hidden_layers"])
    for tensor, array in read_tensors(MODELS / name):
        stored = names.get_name(tensor, try_suffixes=(".weight",))
        writer.add_tensor(stored, array + np.float32(1) if tensor.endswith("norm.weight") else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_checkpoint_survives_the_way_through_gguf(name: str, tmp_path: Path) -> None:
    raw = write(tmp_path / "m.gguf", name)
    read, given = dict(read_gguf_tensors(tmp_path / "m.gguf")), dict(read_tensors(MODELS / name))
    assert read.keys() == given.keys()
    for tensor, array in given.items():
        np.testing.assert_allclose(read[tensor], array, atol=2.5e-7 if tensor.endswith("norm.weight") else 0, rtol=0)
    again = read_gguf_config(tmp_path / "m.gguf")
    assert again["query_pre_attn_scalar"] == raw["head_dim"]  # the fixture's 24 is not of any published model
    del raw["layer_types"]  # files leave them to the family's pattern
    expected = DecoderConfig.from_huggingface(raw | {"query_pre_attn_scalar": raw["head_dim"]})
    assert DecoderConfig.from_huggingface(again) == expected


def test_a_file_is_loaded_whole(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "gemma3")
    model = load_model(str(tmp_path / "m.gguf"))
    assert (model.config.model_type, model.config.activation, model.config.tied) == ("gemma3_text", "gelu_tanh", True)
    assert model.tokenizer.decode(model.tokenizer.encode("a é\n")) == "a é\n"
    assert model.tokenizer.eos_ids == (2,)
    save_model(tmp_path / "saved", model.config, model.raw_config, model.params, model.tokenizer)
    again = load_model(str(tmp_path / "saved"))
    assert again.config == model.config
    for one, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(model.params), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert again.tokenizer.encode("a é\n") == model.tokenizer.encode("a é\n")


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_models_scale_queries_by_their_width(name: str, layers: int, tmp_path: Path) -> None:
    raw = write(tmp_path / "m.gguf", name, layers=layers)
    found = read_gguf_config(tmp_path / "m.gguf")["query_pre_attn_scalar"]
    assert found == raw["hidden_size"] // raw["num_attention_heads"] == 8


@pytest.mark.parametrize(
    ("pattern", "windows"), [(None, (5, 5, 5, 5)), (2, (5, 0, 5, 0)), ([True, False, False, True], (5, 0, 0, 5))]
)
def test_which_layers_slide(pattern: Any, windows: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "gemma3", pattern)
    assert DecoderConfig.from_huggingface(read_gguf_config(tmp_path / "m.gguf")).windows == windows
