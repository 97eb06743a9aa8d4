"""What an update reports of its ratio is of the ratio that its loss takes, and nothing is reported of what it does not do."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from upweight.training.policy_step import Packed, TargetScores, policy_loss
from upweight.training.settings import PRESETS, PolicySettings

OLD = np.float32([-1.0, -1.0, -2.0, -2.0])
SHIFT = np.float32([0.1, -0.1, 0.1, -0.1])  # of two tokens each: it cancels in both sequences
SAMPLE = np.array([0, 0, 1, 1])
GRID = np.zeros((1, 4), np.int32)


def metrics_of(algorithm: str, shift: np.ndarray = SHIFT, off: float = 0.0, correction: str = "truncated") -> dict:
    """Of log-probs OLD + shift, with a sampler at OLD − off."""
    count = np.float32(4)
    packed = Packed(
        tokens=GRID, positions=GRID, block=GRID, segment=GRID, query=np.arange(4), target=np.arange(4), sample=SAMPLE,
        trained=np.ones(4, np.float32), temperature=np.ones(4, np.float32), advantage=np.ones(4, np.float32),
        behaviour=OLD - np.float32(off), old=OLD, reference=OLD, returns=OLD, divisor=count, num_trained=count,
    )  # fmt: skip
    own = "reward" if PRESETS[algorithm].advantage == "returns" else "given"
    settings = PolicySettings(algorithm=algorithm, preset=PRESETS[algorithm], advantage=own, correction=correction)
    _, found = policy_loss(settings, 2, packed, TargetScores(jnp.asarray(OLD + shift)))
    return {name: float(value) for name, value in found.items()}


def test_a_sequence_ratio_of_one_is_not_clipped() -> None:
    for algorithm in ("gspo", "rloo"):
        got = metrics_of(algorithm)
        assert got["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        assert got["ratio_max"] == pytest.approx(1.0, abs=1e-6)
        assert got["clip_fraction_low"] == got["clip_fraction_high"] == 0.0
        assert got["approx_kl"] == pytest.approx(0.005, rel=1e-2)  # of the tokens


def test_the_ratio_of_a_whole_sequence_is_that_of_all_its_tokens() -> None:
    shift = np.float32([0.15, 0.15, -0.15, -0.15])
    got = metrics_of("rloo", shift)
    assert got["ratio_max"] == pytest.approx(np.exp(0.3), rel=1e-5)
    assert got["clip_fraction_low"] == got["clip_fraction_high"] == 0.5
    token = metrics_of("grpo", shift)
    assert token["ratio_max"] == pytest.approx(np.exp(0.15), rel=1e-5)
    assert token["clip_fraction_low"] == token["clip_fraction_high"] == 0.0


def test_what_a_loss_does_not_do_is_not_reported() -> None:
    assert not {"clip_fraction_low", "clip_fraction_high"} & metrics_of("cispo").keys()
    assert "ratio_max" in metrics_of("cispo")
    assert metrics_of("reinforce").keys() == {"logprob_mean", "approx_kl", "is_weight_mean"}


def test_the_weight_is_the_one_that_is_applied() -> None:
    still = np.zeros(4, np.float32)
    assert metrics_of("grpo", still, off=3.0)["is_weight_mean"] == pytest.approx(2.0)
    assert metrics_of("grpo", still, off=3.0, correction="decoupled")["is_weight_mean"] == pytest.approx(np.exp(3.0))
    assert "is_weight_mean" not in metrics_of("grpo", still, off=3.0, correction="none")
