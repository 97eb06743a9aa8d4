"""Every supported family against reference outputs: logits, log-probs, gradients, greedy continuation."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.golden import DATA, WHOLE, load_golden, outputs, rows, tolerances
from upweight.errors import UnsupportedModel
from upweight.models.config import DecoderConfig
from upweight.models.decoder import Decoder
from upweight.weights.layout import params_from_tensors, tensors_from_params
from upweight.weights.safetensors_files import read_tensors

NAMES = [*WHOLE, "llama-gqa-tied-sharded"]


def module(name: str, config_file: str = "config.json") -> Decoder:
    return load_golden(name, config_file).module()


@functools.partial(jax.jit, static_argnums=0)
def logits_of_padded(config: DecoderConfig, params: dict, padded: jax.Array) -> jax.Array:
    return Decoder(config, params)(padded)


def logits_of_rows(model: Decoder, sequences: list[list[int]]) -> np.ndarray:
    """[rows, 32, V]; one program a family."""
    padded = jnp.asarray([ids + [0] * (32 - len(ids)) for ids in sequences])
    return np.asarray(logits_of_padded(model.config, model.params(), padded))


@pytest.mark.parametrize("config_file", ["config.json", "config.v4.json"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_padded_rows(name: str, config_file: str) -> None:
    golden = outputs(name)
    atol = tolerances(name)["logits_atol"]
    logits = logits_of_rows(module(name, config_file), rows(name))
    real = golden["attention_mask"].astype(bool)
    np.testing.assert_allclose(logits[:, : real.shape[1]][real], golden["logits"][real], atol=atol, rtol=0)


@pytest.mark.parametrize("name", WHOLE)
def test_greedy_continuation(name: str) -> None:
    golden = outputs(name)
    model = module(name)
    ids, *others = rows(name)
    for expected in golden["greedy_ids"].tolist():
        assert int(np.argmax(logits_of_rows(model, [ids, *others])[0, len(ids) - 1])) == expected
        ids.append(expected)


@pytest.mark.parametrize("name", WHOLE)
def test_gradient_norms(name: str) -> None:
    golden = outputs(name)
    expected = json.loads((DATA / name / "golden_grads.json").read_text())
    model = module(name)
    ids = jnp.asarray(golden["input_ids"])
    real = jnp.asarray(golden["attention_mask"][:, 1:], bool)

    def loss(params: dict) -> jax.Array:
        logp = jax.nn.log_softmax(Decoder(model.config, params)(ids)[:, :-1])
        chosen = jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(real, chosen, 0.0)) / jnp.sum(real)

    value, grads = jax.jit(jax.value_and_grad(loss))(model.params())
    assert float(value) == pytest.approx(expected["loss"], abs=2e-5)
    named = dict(tensors_from_params(model.config, grads))
    for tensor, norm in expected["param_grad_norm"].items():
        assert float(np.linalg.norm(named[tensor])) == pytest.approx(norm, rel=1e-4, abs=1e-7), tensor


@pytest.mark.parametrize("name", NAMES)
def test_load_and_save_are_bit_equal(name: str) -> None:
    config = DecoderConfig.from_huggingface(json.loads((DATA / name / "config.json").read_text()))
    before = dict(read_tensors(DATA / name))
    after = dict(tensors_from_params(config, params_from_tensors(config, before.items(), dtype=None)))
    assert before.keys() == after.keys()
    for tensor, array in before.items():
        assert array.dtype == after[tensor].dtype
        assert array.tobytes() == after[tensor].tobytes(), tensor


def test_unknown_architecture_and_rope_are_named() -> None:
    raw = json.loads((DATA / "llama-gqa-tied" / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=r"'bert' is not supported; supported: llama"):
        DecoderConfig.from_huggingface(raw | {"model_type": "bert"})
    with pytest.raises(UnsupportedModel, match=r"rope type 'yarn' is not supported; supported: default"):
        DecoderConfig.from_huggingface(raw | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}})
