from collections.abc import Iterator
from pathlib import Path

import pytest

from upweight.inference import InferenceScheduler
from upweight.online import RolloutGenerator
from upweight.weights.loading import LoadedModel, load_model


@pytest.fixture(scope="package")
def model(tiny_model_folder: Path) -> LoadedModel:
    return load_model(str(tiny_model_folder))


@pytest.fixture(scope="package")
def scheduler(model: LoadedModel) -> Iterator[InferenceScheduler]:
    with InferenceScheduler(model.module(), model.tokenizer, max_batch_size=8) as running:
        yield running


@pytest.fixture
def generator(model: LoadedModel, scheduler: InferenceScheduler) -> RolloutGenerator:
    return RolloutGenerator(scheduler, model.tokenizer, max_tokens=5, group_size=3, ignore_eos=True)
