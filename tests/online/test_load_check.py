"""The comparison of engine and trainer after loading: it passes for every family and names both numbers when it does not."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.models.golden import load_golden
from upweight.errors import ModelError
from upweight.inference.engine import Engine
from upweight.online.load_check import check_loaded
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import LoraSettings, PolicySettings
from upweight.weights.loading import load_model


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_families(name: str) -> None:
    model = load_golden(name)
    engine = Engine(model.config, model.params, model.tokenizer, max_rows=2).start()
    found = check_loaded(engine)
    assert engine.stats()["total_tasks"] == engine.stats()["total_tokens"] == 0  # nobody was served
    engine.stop()
    assert found.tokens == 8
    assert found.largest < 1e-4


def test_the_trainer_of_a_job(tiny_model_folder: Path) -> None:
    model = load_model(str(tiny_model_folder))
    for settings in (PolicySettings(), PolicySettings(lora=LoraSettings(rank=2))):
        trainer = PolicyTrainer(model.config, model.params, settings)
        engine = Engine(model.config, trainer.policy_params(), model.tokenizer, max_rows=2).start()
        assert check_loaded(engine, trainer).largest < 1e-4
        engine.stop()


def test_a_short_context(tiny_model_folder: Path) -> None:
    model = load_model(str(tiny_model_folder))
    for context, tokens in ((6, 8), (3, 4)):
        engine = Engine(model.config, model.params, model.tokenizer, max_rows=2, max_context=context).start()
        assert check_loaded(engine).tokens == tokens
        engine.stop()


def test_a_difference_names_both_numbers() -> None:
    model = load_golden("llama-gqa-tied")
    wrong = dict(model.params, norm=model.params["norm"] * 1.01)
    trainer = PolicyTrainer(model.config, wrong, PolicySettings())
    engine = Engine(model.config, model.params, model.tokenizer, max_rows=2).start()
    said = r"token \d+ has log-prob -\d+\.\d+ in the engine and -\d+\.\d+ in the trainer, each may differ by 0\.001"
    with pytest.raises(ModelError, match=said) as caught:
        check_loaded(engine, trainer)
    assert "\n" not in str(caught.value)
    engine.stop()
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), model.params)
    engine = Engine(model.config, broken, model.tokenizer, max_rows=2).start()
    with pytest.raises(ModelError, match=r"the engine cannot answer with the loaded model: .*not finite"):
        check_loaded(engine)
    engine.stop()
