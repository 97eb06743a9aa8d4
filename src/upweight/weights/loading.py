"""A model on this machine → config, parameters and tokenizer; and back to a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from upweight.models.config import DecoderConfig
from upweight.models.decoder import Decoder
from upweight.models.layers import Params
from upweight.tokenizer import Tokenizer
from upweight.weights.config import read_config, read_tokenizer
from upweight.weights.gguf import read_gguf_tensors
from upweight.weights.layout import params_from_tensors, tensors_from_params
from upweight.weights.safetensors_files import read_tensors, write_folder
from upweight.weights.source import ModelSource, resolve


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Everything needed to run a model; `raw_config` keeps what its files said, for saving."""

    source: ModelSource
    config: DecoderConfig
    raw_config: Mapping[str, Any]
    params: Params
    tokenizer: Tokenizer

    def module(self) -> Decoder:
        """A Flax NNX module that shares `params`."""
        return Decoder(self.config, self.params)


def load_model(name: str | ModelSource, dtype: jnp.dtype | None = jnp.float32) -> LoadedModel:
    """Raises errors of the `ModelError` branch; `dtype` None keeps the stored one."""
    source = resolve(name) if isinstance(name, str) else name
    raw = read_config(source)
    config = DecoderConfig.from_huggingface(raw)
    return LoadedModel(
        source=source,
        config=config,
        raw_config=raw,
        params=load_params(source, config, dtype),
        tokenizer=read_tokenizer(source),
    )


def load_params(source: ModelSource, config: DecoderConfig, dtype: jnp.dtype | None = jnp.float32) -> Params:
    tensors = read_gguf_tensors(source.path) if source.kind == "gguf" else read_tensors(source.path)
    return params_from_tensors(config, tensors, dtype)


def save_model(
    folder: str | Path,
    config: DecoderConfig,
    raw_config: Mapping[str, Any],
    params: Params,
    tokenizer: Tokenizer | None,
) -> None:
    """Writes a Hugging Face folder that other tools load; it appears whole or not at all."""
    write_folder(folder, dict(raw_config), tensors_from_params(config, params), tokenizer)
