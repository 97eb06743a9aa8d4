"""What tests of several folders share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

SMOLLM2 = Path(__file__).parent / "data" / "smollm2"

# One compilation cache for all tests and the programs that they start: each XLA program is compiled once a checkout.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# Most tests compile more than they compute. A variable that is set, if only to nothing, means what users get.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# A run started in the background ignores SIGINT, and so would every program that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


# Linux gives a process 65,530 memory maps. Each compiled program takes about ten, and LLVM dies without a word at the end.
MAPS_TO_KEEP = 15_000


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_go_with_their_file() -> Iterator[None]:
    yield
    if "jax" in sys.modules and _memory_maps() > MAPS_TO_KEEP:
        sys.modules["jax"].clear_caches()
        gc.collect()


def _memory_maps() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights (32 wide, 2 layers, 512 tokens of context) and SmolLM2's real tokenizer."""
    import jax

    from upweight.models.config import DecoderConfig
    from upweight.models.decoder import random_params
    from upweight.tokenizer import Tokenizer
    from upweight.weights.loading import save_model

    tokenizer = Tokenizer.from_folder(SMOLLM2)
    raw = {**TINY_CONFIG, "vocab_size": tokenizer.vocab_size}
    config = DecoderConfig.from_huggingface(raw)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder, config, raw, random_params(config, jax.random.key(0)), tokenizer)
    return folder
