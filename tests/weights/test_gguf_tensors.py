"""The demo model's tensors against the reference rows, and its config."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upweight.errors import ModelError, UnsupportedModel
from upweight.tokenizer.gguf_header import GgufHeader, TensorPlace, read_header
from upweight.weights.gguf import hugging_face_name, read_gguf_config, read_gguf_tensors
from upweight.weights.gguf_config import config_of

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smollm2" / "weights.json").read_text())


def test_the_file_is_the_one_of_the_reference(smollm_path: Path) -> None:
    assert hashlib.sha256(smollm_path.read_bytes()).hexdigest() == REFERENCE["gguf_sha256"]


def test_every_tensor(smollm_path: Path) -> None:
    rows = {row[0]: dict(zip(REFERENCE["columns"], row, strict=True)) for row in REFERENCE["tensors"]}
    start = time.process_time()
    tensors = dict(read_gguf_tensors(smollm_path))
    assert time.process_time() - start < 6  # measured: 0.9 s on two shared cores
    assert sorted(tensors) == sorted(rows)
    assert len(tensors) == 272
    for name, array in tensors.items():
        row = rows[name]
        assert array.dtype == np.float32, name
        assert list(array.shape) == row["shape"], name
        assert array.flags.c_contiguous, name
        assert array.flags.writeable, name
        wide = array.astype(np.float64)
        # The reference is written with ten digits; a sum of many signed values is only as exact as its parts.
        assert wide.sum() == pytest.approx(row["sum"], rel=1e-8, abs=1e-6), name
        assert np.sqrt((wide**2).sum()) == pytest.approx(row["l2"], rel=1e-9), name
        flat, n = array.reshape(-1), array.size
        assert flat[[0, 1, n // 3, n // 2, n - 1]].tolist() == pytest.approx(row["probe"], rel=1e-8), name
        assert hugging_face_name(row["gguf_name"]) == name


def test_config(smollm_path: Path) -> None:
    assert read_gguf_config(smollm_path) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }


def header(architecture: str = "llama", *tensors: str, **entries: Any) -> GgufHeader:
    sizes = {"embedding_length": 8, "feed_forward_length": 16, "block_count": 1, "context_length": 32}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6}
    metadata = {f"{architecture}.{key}": value for key, value in (sizes | entries).items()}
    places = tuple(TensorPlace(name, (8, 10), 0, 0) for name in ("token_embd.weight", *tensors))
    return GgufHeader("m.gguf", {"general.architecture": architecture} | metadata, places)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_config_of_architectures(architecture: str) -> None:
    config = config_of(header(architecture, "output.weight", **{"attention.key_length": 4}))
    assert config["model_type"] == architecture
    assert config["head_dim"] == 4
    assert (config["tie_word_embeddings"], config["rope_theta"]) == (False, 10000.0)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (lambda: header("mamba"), "'mamba'.*llama, qwen2, qwen3, gemma2, gemma3"),
        (lambda: header("llama", expert_count=8), "mixture of experts"),
        (lambda: header("llama", "rope_freqs.weight"), "rope_freqs"),
        (lambda: header("llama", **{"rope.scaling.type": "yarn"}), "'yarn'"),
        (lambda: header("llama", **{"attention.head_count_kv": [1, 2]}), "head_count_kv"),
        (lambda: header("llama", **{"rope.dimension_count": 1}), "rotates 1 of 2"),
    ],
)
def test_what_the_config_cannot_say_is_refused(bad: Any, problem: str) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        config_of(bad())


def test_unknown_tensors_are_refused() -> None:
    for name in ("blk.0.attn_sinks.weight", "blk.0.attn_q.scale", "cls.weight", "blk.x.attn_q.weight"):
        with pytest.raises(UnsupportedModel, match="is not known"):
            hugging_face_name(name)


def test_a_cut_off_file(smollm_path: Path, tmp_path: Path) -> None:
    last = max(place.offset for place in read_header(smollm_path).tensors)
    short = tmp_path / "short.gguf"
    with open(smollm_path, "rb") as file:
        short.write_bytes(file.read(last))
    with pytest.raises(ModelError, match="fetch it again"):
        list(read_gguf_tensors(short))
