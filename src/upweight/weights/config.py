"""The config of a model from either kind of source."""

from pathlib import Path
from typing import Any

from upweight.errors import ModelError
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.folder_tokenizer import read_json
from upweight.weights.gguf_config import read_gguf_config
from upweight.weights.source import ModelSource


def read_config(source: ModelSource) -> dict[str, Any]:
    """Entries of config.json, or what a GGUF file says in their words; `ModelError` when there is none."""
    if source.kind == "gguf":
        return read_gguf_config(source.path)
    config = read_json(Path(source.path) / "config.json")
    if not config.get("model_type"):
        raise ModelError(f"{source.path}/config.json names no model_type")
    return config


def read_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of either kind of source."""
    return Tokenizer.from_gguf(source.path) if source.kind == "gguf" else Tokenizer.from_folder(source.path)
