"""What is read from config.json in its older and newer spelling, and what is refused in one line."""

import json
import re
from typing import Any

import numpy as np
import pytest

from tests.models.golden import DATA
from upweight.errors import ModelError, UnsupportedModel
from upweight.models.config import SUPPORTED, DecoderConfig, RopeConfig
from upweight.models.layers import rope_frequencies

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def raw(name: str = "llama-gqa-tied", **changes: Any) -> dict[str, Any]:
    return json.loads((DATA / name / "config.v4.json").read_text()) | changes


def read(name: str = "llama-gqa-tied", **changes: Any) -> DecoderConfig:
    return DecoderConfig.from_huggingface(raw(name, **changes))


@pytest.mark.parametrize("name", sorted(path.parent.name for path in DATA.glob("*/config.json")))
def test_both_spellings_say_the_same(name: str) -> None:
    newer = json.loads((DATA / name / "config.json").read_text())
    assert DecoderConfig.from_huggingface(newer) == read(name)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 1.0}, RopeConfig(theta=5e5)),
        ({"rope_theta": 1e4, "rope_scaling": None}, RopeConfig(theta=1e4)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeConfig(theta=1e4, kind="linear", factor=4.0),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0),
        ),
    ],
)
def test_rope(entries: dict[str, Any], expected: RopeConfig) -> None:
    assert read(**entries).rope == expected


def test_scaled_frequencies() -> None:
    plain = np.asarray(rope_frequencies(RopeConfig(theta=1e4), 64))
    np.testing.assert_allclose(plain[:2], [1.0, 1e4 ** (-2 / 64)], rtol=1e-6)
    linear = np.asarray(rope_frequencies(RopeConfig(theta=1e4, kind="linear", factor=4.0), 64))
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)
    llama3 = np.asarray(rope_frequencies(RopeConfig(theta=1e4, kind="llama3", factor=4.0, original_context=64), 64))
    # Waves shorter than 64 / 4 are kept, those longer than 64 / 1 are stretched by the factor.
    np.testing.assert_allclose(llama3[2 * np.pi / plain < 16], plain[2 * np.pi / plain < 16], rtol=1e-6)
    np.testing.assert_allclose(llama3[2 * np.pi / plain > 64], plain[2 * np.pi / plain > 64] / 4, rtol=1e-6)


DEFAULT = {"rope_type": "default", "rope_theta": 5e5}


def test_both_spellings_of_rope_at_once_must_agree() -> None:
    """A long context is often switched on by adding `rope_scaling`, also to a config of the newer spelling."""
    with pytest.raises(UnsupportedModel, match="rope type 'yarn' is not supported"):
        read(rope_parameters=DEFAULT, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ModelError, match=r"rope_parameters .* and rope_scaling .*, which differ: leave out the one"):
        read(rope_parameters=DEFAULT, rope_scaling={"type": "linear", "factor": 4.0})
    llama3 = {"rope_type": "llama3", **LLAMA3}
    both = read(rope_parameters={**llama3, "rope_theta": 5e5}, rope_scaling=llama3)
    assert both.rope == RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=8192)
    assert read(rope_parameters=DEFAULT, rope_scaling=None).rope == RopeConfig(theta=5e5)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "mrope", "ntk"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_unknown_rope_types_are_refused(kind: str, spelling: str) -> None:
    with pytest.raises(
        UnsupportedModel, match=f"rope type '{kind}' is not supported; supported: default, linear, llama3"
    ):
        read(rope_scaling={spelling: kind, "factor": 4.0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mixtral"}, f"model_type 'mixtral' is not supported; supported: {', '.join(SUPPORTED)}"),
        ({"model_type": None}, "model_type 'None' is not supported"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported for llama; supported: silu"),
        ({"attention_bias": True}, "attention_bias=true is not supported for llama"),
        ({"mlp_bias": True}, "mlp_bias=true is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_is_not_known_is_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


def test_the_page_names_what_is_supported() -> None:
    page = (DATA.parents[2] / "docs" / "jobs.md").read_text()
    told = page[page.index("Supported `model_type`s") :].split(", with RoPE")[0]
    assert tuple(re.findall(r"`(\w+)`", told.partition("are")[2])) == SUPPORTED


def test_missing_entries_are_named() -> None:
    with pytest.raises(ModelError, match=r"config has no hidden_size: fetch config\.json again"):
        read(hidden_size=None)
    with pytest.raises(ModelError, match="config has no factor"):
        read(rope_scaling={"rope_type": "linear"})


def test_windows_of_configs_without_layer_types() -> None:
    def windows(name: str, **changes: Any) -> tuple[int, ...]:
        entries = raw(name, num_hidden_layers=7, **changes)
        entries.pop("layer_types", None)
        return DecoderConfig.from_huggingface(entries).windows

    assert windows("gemma2") == (5, 0, 5, 0, 5, 0, 5)
    assert windows("gemma3") == (5, 5, 5, 5, 5, 0, 5)
    assert windows("mistral-window5") == (5,) * 7
    assert windows("mistral-window5", sliding_window=None) == (0,) * 7
    assert windows("qwen2", sliding_window=9) == (0,) * 7
    assert windows("qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=5) == (0,) * 5 + (9, 9)
    with pytest.raises(UnsupportedModel, match="layer_types must be 3 of sliding_attention, full_attention; it has 1"):
        read("gemma2", layer_types=["chunked_attention"])


def test_gemma_entries_and_their_defaults() -> None:
    config = read("gemma2")
    assert (config.attn_softcap, config.final_softcap, config.norm_offset) == (3.0, 8.0, 1.0)
    assert config.query_scale == 24**-0.5
    assert config.embed_scale == 32**0.5
    bare = raw("gemma2")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "hidden_activation"):
        bare.pop(name)
    usual = DecoderConfig.from_huggingface(bare)
    assert (usual.attn_softcap, usual.final_softcap, usual.query_scale) == (50.0, 30.0, 1 / 16)
    assert usual.activation == "gelu_tanh"
    assert usual.tied
    assert read("gemma3").attn_softcap == 0.0
    assert read("gemma3").rope_local == RopeConfig(theta=1e4)
    stretched = read("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert stretched.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert stretched.rope_local == RopeConfig(theta=1e4)


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("rope_scaling", "yarn", "has rope_scaling 'yarn', which is no object"),
        ("rope_scaling", [1], r"has rope_scaling \[1\], which is no object"),
        ("rope_scaling", {"rope_type": "linear", "factor": "x"}, "cannot be read: could not convert string to float"),
        ("num_attention_heads", "x", "cannot be read: invalid literal for int"),
    ],
)
def test_entries_of_a_wrong_kind_are_one_clear_line(entry: str, value: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        read(**{entry: value})
    assert "\n" not in str(caught.value)
