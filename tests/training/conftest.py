import jax
import pytest

from upweight.models.config import DecoderConfig, RopeConfig
from upweight.models.decoder import random_params
from upweight.models.layers import Params


@pytest.fixture(scope="session")
def config() -> DecoderConfig:
    return DecoderConfig(
        model_type="qwen3",
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_context=64,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1000.0),
        tied=False,
        qk_norm=True,
        windows=(0, 5),
    )


@pytest.fixture(scope="session")
def params(config: DecoderConfig) -> Params:
    return random_params(config, jax.random.key(0), scale=0.4)
