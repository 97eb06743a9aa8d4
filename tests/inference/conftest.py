"""A tiny model with sharp distributions, so that a wrong context shows."""

from pathlib import Path

import pytest

from upweight.weights.loading import LoadedModel, load_model


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> LoadedModel:
    loaded = load_model(str(tiny_model_folder))
    # Larger weights than at the start of a training: logits far from uniform, so that a wrong context shows.
    embed = loaded.params["embed"] * 40.0
    layers = [{k: v * (8.0 if v.ndim == 2 else 1.0) for k, v in layer.items()} for layer in loaded.params["layers"]]
    loaded.params.update(embed=embed, layers=layers)
    return loaded
