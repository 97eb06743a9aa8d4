"""Preference losses against float64 and known numbers."""

import math

import numpy as np
import pytest

from tests.ops.float64 import check
from upweight.ops.preference_loss import PAIR_LOSSES, PairSettings

MARGIN = np.array([-3.0, -0.4, 0.0, 0.7, 2.5, 12.0], np.float32)
SETTINGS = PairSettings(beta=0.3, smoothing=0.1, gamma=0.8)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def by_hand(name: str, margin: float) -> float:
    x = 0.3 * margin
    return {
        "sigmoid": -0.9 * log_sigmoid(x) - 0.1 * log_sigmoid(-x),
        "robust": (-0.9 * log_sigmoid(x) + 0.1 * log_sigmoid(-x)) / 0.8,
        "hinge": max(0.0, 1 - x),
        "ipo": (margin - 1 / 0.6) ** 2,
        "simpo": -log_sigmoid(x - 0.8),
    }[name]


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_values_and_slopes(name: str) -> None:
    check(
        lambda m: PAIR_LOSSES[name](m, SETTINGS),
        lambda m: np.array([by_hand(name, float(one)) for one in m]),
        MARGIN,
        eager=True,
    )


def test_known_numbers() -> None:
    zero = np.zeros(1, np.float32)
    plain = {name: float(f(zero, PairSettings())[0]) for name, f in PAIR_LOSSES.items()}
    assert plain == pytest.approx(
        {"sigmoid": math.log(2), "robust": math.log(2), "hinge": 1.0, "ipo": 25.0, "simpo": math.log1p(math.exp(0.5))}
    )


def test_far_margins_stay_finite() -> None:
    far = np.array([-1e4, 1e4], np.float32)
    for f in PAIR_LOSSES.values():
        assert np.isfinite(f(far, SETTINGS)).all()
