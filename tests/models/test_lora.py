"""Low-rank adapters: fresh ones change nothing, merged ones act like the pair, the base keeps its dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upweight.errors import ConfigError
from upweight.models.config import DecoderConfig, RopeConfig
from upweight.models.decoder import causal_mask, forward_hidden, random_params
from upweight.models.layers import Params
from upweight.models.lora import init_adapter, merge

CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_context=32,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1000.0),
    tied=True,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 8)))
POSITIONS = jnp.broadcast_to(jnp.arange(8), (2, 8))


@jax.jit
def hidden(params: Params, adapter: Params | None) -> jax.Array:
    return forward_hidden(CONFIG, params, TOKENS, POSITIONS, causal_mask(POSITIONS), adapter, 0.5)


def random_adapter(targets: str = "all-linear") -> Params:
    fresh = init_adapter(CONFIG, jax.random.key(1), rank=3, targets=targets)
    return jax.tree.map(lambda x: 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), fresh)


def test_fresh_adapter() -> None:
    params = random_params(CONFIG, jax.random.key(0), scale=0.3)
    adapter = init_adapter(CONFIG, jax.random.key(1), rank=3)
    np.testing.assert_array_equal(hidden(params, adapter), hidden(params, None))
    pair = adapter["layers"][0]["down"]
    assert pair["a"].shape == (24, 3)
    assert pair["b"].shape == (3, 16)
    assert 0.8 * 24**-0.5 < float(jnp.abs(pair["a"]).max()) <= 24**-0.5
    assert not np.array_equal(pair["a"], adapter["layers"][1]["down"]["a"])


@pytest.mark.parametrize("targets", ["all-linear", "attention", "mlp"])
def test_merged_acts_like_the_adapter(targets: str) -> None:
    params, adapter = random_params(CONFIG, jax.random.key(0), scale=0.3), random_adapter(targets)
    merged = merge(params, adapter, 0.5)
    apart = hidden(params, adapter)
    np.testing.assert_allclose(hidden(merged, None), apart, atol=1e-5)
    assert np.abs(np.asarray(apart - hidden(params, None))).max() > 0.1
    name, pair = next(iter(adapter["layers"][1].items()))
    want = np.asarray(params["layers"][1][name]) + 0.5 * np.asarray(pair["a"]) @ np.asarray(pair["b"])
    np.testing.assert_allclose(merged["layers"][1][name], want, atol=1e-6)


def test_a_bfloat16_base_stays_bfloat16() -> None:
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(CONFIG, jax.random.key(0), scale=0.3))
    adapter = random_adapter()
    out = hidden(low, adapter)
    merged = merge(low, adapter, 0.5)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype(jnp.bfloat16)}
    gap = np.abs(np.asarray(out - hidden(merged, None), np.float32))
    assert gap.mean() < 0.02


def test_unknown_targets_are_named() -> None:
    with pytest.raises(ConfigError, match=r"lora.targets 'heads' is not known; known: all-linear, attention, mlp"):
        init_adapter(CONFIG, jax.random.key(0), rank=2, targets="heads")
