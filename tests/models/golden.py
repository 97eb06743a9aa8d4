"""The golden checkpoints as loaded models. They have no tokenizer of their own; SmolLM2's stands in, since only ids matter."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.conftest import SMOLLM2
from upweight.models.config import DecoderConfig
from upweight.tokenizer import Tokenizer
from upweight.weights.layout import params_from_tensors
from upweight.weights.loading import LoadedModel
from upweight.weights.safetensors_files import read_tensors
from upweight.weights.source import ModelSource

DATA = Path(__file__).parents[1] / "data" / "models"
WHOLE = ["llama-gqa-tied", "llama-rope3-untied", "mistral-window5", "qwen2", "qwen3", "gemma2", "gemma3"]


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(SMOLLM2)


def load_golden(name: str, config_file: str = "config.json") -> LoadedModel:
    raw = json.loads((DATA / name / config_file).read_text())
    config = DecoderConfig.from_huggingface(raw)
    params = params_from_tensors(config, read_tensors(DATA / name))
    source = ModelSource("folder", str(DATA / name), name)
    return LoadedModel(source=source, config=config, raw_config=raw, params=params, tokenizer=tokenizer())


@functools.cache
def outputs(name: str) -> dict[str, np.ndarray]:
    return load_file(DATA / name / "golden.safetensors")


def rows(name: str) -> list[list[int]]:
    """The real tokens of each row."""
    golden = outputs(name)
    return [
        ids[mask.astype(bool)].tolist() for ids, mask in zip(golden["input_ids"], golden["attention_mask"], strict=True)
    ]


def tolerances(name: str) -> dict[str, Any]:
    table = json.loads((DATA / "tolerances.json").read_text())
    return table[name.removesuffix("-sharded")]["recommended"]
