"""Losses, aggregations and KL estimators against float64 loops, and their gradients against finite differences of those."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upweight.ops.policy_loss import AGGREGATIONS, KL_ESTIMATORS, LOSSES, Limits

LIMITS = Limits(low=0.2, high=0.3, cispo_max=1.25, num_samples=4)
SAMPLE = np.array([0, 2, 0, 1, 2, 0, 1, 0, 2, 3, 3])
TRAINED = np.array([1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0], np.float32)  # sample 3 has nothing trained
LP = np.array([-0.3, -1.1, -2.0, -0.5, -0.1, -7.0, -8.0, -1.5, -0.9, -1.0, -2.0], np.float32)
SHIFT = np.array([0.05, -0.4, 0.5, 0.1, -0.35, 0.0, 0.0, -0.02, -0.15, 0.0, 0.0], np.float32)
OLD = LP - SHIFT
ADVANTAGE = np.array([1.5, -0.7, 1.5, 0.4, -0.7, 1.5, 0.4, 1.5, -0.7, 9.0, 9.0], np.float32)
POISON = [np.nan, np.inf, -np.inf, -1e4]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def members(i: int) -> list[int]:
    return [j for j in range(len(SAMPLE)) if SAMPLE[j] == SAMPLE[i] and TRAINED[j]]


def loss_at(name: str, lp: np.ndarray, i: int, fixed: np.ndarray) -> float:
    """One token's loss; `fixed` are the log-probs where gradients stop."""
    if not TRAINED[i]:
        return 0.0
    advantage = float(ADVANTAGE[i])
    mine = members(i)
    shifts = [float(lp[j]) - float(OLD[j]) for j in mine]
    if name == "reinforce":
        return -advantage * float(lp[i])
    if name == "cispo":
        weight = min(math.exp(float(fixed[i]) - float(OLD[i])), LIMITS.cispo_max)
        return -weight * advantage * float(lp[i])
    if name == "clip":
        ratio = math.exp(float(lp[i]) - float(OLD[i]))
    elif name == "clip_sequence":
        ratio = math.exp(sum(shifts) / len(shifts))
    else:
        ratio = math.exp(sum(shifts))
    loss = -min(ratio * advantage, clip(ratio, 1 - LIMITS.low, 1 + LIMITS.high) * advantage)
    return loss / len(mine) if name == "clip_sequence_sum" else loss


def slope(f: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    """Central differences in float64."""
    at = at.astype(np.float64)
    steps = 1e-6 * np.eye(len(at))
    return np.array([(f(at + step) - f(at - step)) / 2e-6 for step in steps])


def values_and_gradient(f: Callable, lp: np.ndarray, jit: bool) -> tuple[np.ndarray, np.ndarray]:
    """Per-token values, and the gradient of Σ (1 + i/10)·value."""
    weights = 1 + jnp.arange(len(lp)) / 10

    def total(lp: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = f(lp)
        return jnp.sum(jnp.atleast_1d(values) * weights[: jnp.size(values)]), values

    run = jax.grad(total, has_aux=True)
    gradient, values = (jax.jit(run) if jit else run)(jnp.asarray(lp))
    return np.asarray(values), np.asarray(gradient)


def weighted(values: list[float]) -> float:
    return sum((1 + i / 10) * value for i, value in enumerate(values))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, jit: bool) -> None:
    every = range(len(LP))
    values, gradient = values_and_gradient(
        lambda lp: LOSSES[name](lp, OLD, ADVANTAGE, TRAINED, SAMPLE, LIMITS), LP, jit
    )
    np.testing.assert_allclose(values, [loss_at(name, LP, i, LP) for i in every], rtol=2e-6, atol=1e-7)
    by_hand = slope(lambda lp: weighted([loss_at(name, lp, i, LP) for i in every]), LP)
    np.testing.assert_allclose(gradient, by_hand, rtol=1e-5, atol=1e-6)
    assert values.dtype == np.float32


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("name", LOSSES)
def test_masked_entries_change_neither_value_nor_gradient(name: str, poison: float) -> None:
    def run(lp: np.ndarray, old: np.ndarray, advantage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return values_and_gradient(lambda lp: LOSSES[name](lp, old, advantage, TRAINED, SAMPLE, LIMITS), lp, True)

    plain = run(LP, OLD, ADVANTAGE)
    poisoned = run(*(np.where(TRAINED > 0, x, np.float32(poison)) for x in (LP, OLD, ADVANTAGE)))
    for before, after in zip(plain, poisoned, strict=True):
        np.testing.assert_array_equal(before, after)
    assert not plain[1][TRAINED == 0].any()


def test_log_ratios_stop_at_twenty() -> None:
    lp, old = np.array([0.0, -90.0], np.float32), np.array([-90.0, 0.0], np.float32)
    ones, sample = np.ones(2, np.float32), np.arange(2)
    for name, advantage in (("clip", -1.0), ("clip_sequence", -1.0), ("clip_sequence_sum", -1.0)):
        loss = LOSSES[name](lp, old, advantage * ones, ones, sample, Limits(num_samples=2))
        np.testing.assert_allclose(loss, [math.exp(20), 0.8], rtol=1e-5)


def aggregate(name: str, x: np.ndarray, max_length: int) -> float:
    total = 0.0
    sequences = [k for k in range(4) if ((k == SAMPLE) & (TRAINED > 0)).any()]
    if name == "token_mean":
        return sum(float(v) for v, m in zip(x, TRAINED, strict=True) if m) / float(TRAINED.sum())
    for k in sequences:
        mine = [float(x[i]) for i in range(len(x)) if SAMPLE[i] == k and TRAINED[i]]
        total += sum(mine) / (len(mine) if name == "seq_mean_token_mean" else 1)
    return total / len(sequences) / (max_length if name == "seq_mean_token_sum_norm" else 1)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations(name: str, jit: bool) -> None:
    rule = AGGREGATIONS[name]
    divisor = rule.divisor(num_tokens=7, num_sequences=3, max_length=50)
    for fill in (0.0, *POISON):
        x = np.where(TRAINED > 0, LP, np.float32(fill))
        value, gradient = values_and_gradient(lambda x: rule.numerator(x, TRAINED, SAMPLE, 4) / divisor, x, jit)
        assert float(value) == pytest.approx(aggregate(name, LP, 50), rel=1e-6)
        expected = slope(lambda x: aggregate(name, x, 50), LP)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)


def test_long_answers_weigh_more_in_the_token_mean_only() -> None:
    """Lengths 1 and 4 with advantages −1 and +1: token mean −0.6 of the loss, sequence mean 0."""
    sample, trained = np.array([0, 1, 1, 1, 1]), np.ones(5, np.float32)
    loss = np.array([1, -1, -1, -1, -1], np.float32)
    got = {n: float(a.numerator(loss, trained, sample, 2)) / a.divisor(5, 2, 8) for n, a in AGGREGATIONS.items()}
    assert got == pytest.approx(
        {
            "token_mean": -0.6,
            "seq_mean_token_mean": 0.0,
            "seq_mean_token_sum": -1.5,
            "seq_mean_token_sum_norm": -1.5 / 8,
        }
    )


KL: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_estimators(name: str, jit: bool) -> None:

    def by_hand(lp: np.ndarray) -> list[float]:
        return [KL[name](float(a) - float(b)) if m else 0.0 for a, b, m in zip(lp, OLD, TRAINED, strict=True)]

    expected = slope(lambda lp: weighted(by_hand(lp)), LP)
    for fill in (0.0, *POISON):
        lp, ref = (np.where(TRAINED > 0, x, np.float32(fill)) for x in (LP, OLD))
        values, gradient = values_and_gradient(lambda lp, ref=ref: KL_ESTIMATORS[name](lp, ref, TRAINED), lp, jit)
        np.testing.assert_allclose(values, by_hand(LP), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_only_k3_is_clamped() -> None:
    lp, ref, one = np.array([-100.0], np.float32), np.array([0.0], np.float32), np.ones(1, np.float32)
    assert float(KL_ESTIMATORS["k3"](lp, ref, one)[0]) == pytest.approx(math.exp(20) - 21, rel=1e-5)
    assert float(KL_ESTIMATORS["k1"](lp, ref, one)[0]) == -100.0
    assert float(KL_ESTIMATORS["k2"](lp, ref, one)[0]) == 5000.0


@pytest.mark.parametrize("jit", [False, True])
def test_dual_clip_bounds_the_loss_of_negative_advantages(jit: bool) -> None:
    """Ratio 5 at Â = −2: plain 10, with c = 3 at most 6, and no gradient beyond the bound. Â = 2 is clipped at 1.2 as ever."""
    old, advantage = jnp.zeros(3), jnp.array([-2.0, 2.0, -2.0])
    lp = jnp.log(jnp.array([5.0, 5.0, 2.5]))
    ones, sample = jnp.ones(3), jnp.zeros(3, jnp.int32)

    def total(lp: jax.Array, bound: float | None) -> tuple[jax.Array, jax.Array]:
        per_token = LOSSES["clip"](lp, old, advantage, ones, sample, Limits(dual_clip=bound))
        return per_token.sum(), per_token

    run = jax.value_and_grad(total, has_aux=True)
    run = jax.jit(run, static_argnums=1) if jit else run
    (_, plain), _ = run(lp, None)
    (_, bounded), gradient = run(lp, 3.0)
    np.testing.assert_allclose(plain, [10.0, -2.4, 5.0], rtol=1e-5)
    np.testing.assert_allclose(bounded, [6.0, -2.4, 5.0], rtol=1e-5)
    np.testing.assert_allclose(gradient, [0.0, 0.0, 5.0], rtol=1e-5)
