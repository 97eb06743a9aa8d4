"""Model → load → save → load: the bits of every tensor, from each kind of source."""

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from tests.conftest import SMOLLM2
from upweight.models.config import DecoderConfig
from upweight.tokenizer import Tokenizer
from upweight.weights.config import read_config
from upweight.weights.loading import load_model, load_params, save_model
from upweight.weights.safetensors_files import read_tensors, write_folder
from upweight.weights.source import ModelSource, resolve

MODELS = Path(__file__).parents[1] / "data" / "models"
NAMES = sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def bits(folder: Path) -> dict[str, tuple[str, bytes]]:
    return {name: (array.dtype.name, array.tobytes()) for name, array in read_tensors(folder)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_folders(name: str, dtype: type, tmp_path: Path) -> None:
    """Tied and untied, one file and shards, as a user loads and saves them."""
    raw = read_config(resolve(str(MODELS / name)))
    shard = 20_000 if name.endswith("sharded") else 1 << 30
    tensors = [(key, array.astype(dtype)) for key, array in read_tensors(MODELS / name)]
    write_folder(tmp_path / "given", raw, tensors, Tokenizer.from_folder(SMOLLM2), max_shard_bytes=shard)
    assert (len(list((tmp_path / "given").glob("*.safetensors"))) > 1) == name.endswith("sharded")
    model = load_model(str(tmp_path / "given"), dtype=None)
    save_model(tmp_path / "saved", model.config, model.raw_config, model.params, model.tokenizer)
    assert bits(tmp_path / "saved") == bits(tmp_path / "given")
    again = load_model(str(tmp_path / "saved"), dtype=None)
    assert again.config == model.config
    assert again.tokenizer.eos_ids == model.tokenizer.eos_ids


@pytest.mark.parametrize("storage", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_gguf_to_safetensors(storage: str, tmp_path: Path) -> None:
    """What a quantised file says in float32 is what a folder written from it says."""
    source = resolve(str(MODELS / "qwen3"))
    raw = read_config(source)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    kind = gguf.GGMLQuantizationType[storage]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, raw["num_hidden_layers"])
    for name, array in read_tensors(source.path):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if array.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = ModelSource("gguf", str(tmp_path / "m.gguf"), "m")
    config = DecoderConfig.from_huggingface(read_config(file))
    params = load_params(file, config)
    save_model(tmp_path / "saved", config, read_config(file), params, Tokenizer.from_folder(SMOLLM2))
    again = load_model(str(tmp_path / "saved"))
    assert again.config == config
    for layer, given in zip(again.params["layers"], params["layers"], strict=True):
        for key, array in given.items():
            assert np.asarray(layer[key]).tobytes() == np.asarray(array).tobytes(), key
    for key in ("embed", "norm"):
        assert np.asarray(again.params[key]).tobytes() == np.asarray(params[key]).tobytes()
    original = dict(read_tensors(source.path))["model.embed_tokens.weight"]
    assert not np.array_equal(np.asarray(params["embed"]), original), (
        "a quantised file is not the model that it was made from"
    )
