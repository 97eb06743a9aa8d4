"""The gradient accumulator and the loss scaler."""

import jax.numpy as jnp
import numpy as np
import pytest

from upweight.training import (
    DynamicLossScaler,
    DynamicLossScalerConfig,
    GradientAccumulator,
    GradientAccumulatorConfig,
)


def test_t7_the_mean_is_over_the_steps_that_were_made() -> None:
    accumulator = GradientAccumulator(GradientAccumulatorConfig(accumulation_steps=4))
    for value in (1.0, 2.0, 6.0):
        accumulator.accumulate({"w": jnp.full(2, value)})
    assert accumulator.current_step == 3
    np.testing.assert_allclose(accumulator.get_gradients()["w"], [3.0, 3.0])
    assert accumulator.current_step == 0
    with pytest.raises(RuntimeError, match="no gradients were accumulated"):
        accumulator.get_gradients()


def test_sums_and_rounds() -> None:
    accumulator = GradientAccumulator(GradientAccumulatorConfig(2, normalize_gradients=False))
    for value in (1.0, 2.0):
        accumulator.accumulate(jnp.float32(value))
    assert accumulator.get_gradients() == 3.0
    assert [accumulator.should_update(step) for step in range(4)] == [False, True, False, True]
    accumulator.accumulate(jnp.float32(5))
    accumulator.reset()
    assert accumulator.current_step == 0
    with pytest.raises(ValueError, match="accumulation_steps is 0"):
        GradientAccumulatorConfig(0)
    assert GradientAccumulator().should_update(0)


def test_the_scale_grows_after_a_while_and_shrinks_at_once() -> None:
    scaler = DynamicLossScaler(DynamicLossScalerConfig(initial_scale=8, growth_interval=2, max_scale=16, min_scale=2))
    assert scaler.scale_loss(jnp.float32(2.0)) == 16
    np.testing.assert_allclose(scaler.unscale_gradients({"w": jnp.full(1, 4.0)})["w"], [0.5])
    assert not scaler.check_overflow({"w": jnp.ones(2)})
    assert scaler.check_overflow({"v": jnp.ones(2), "w": jnp.array([1.0, jnp.inf])})
    scales = []
    for overflow in (False, False, False, False, True, True, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.scale)
    assert scales == [8, 16, 16, 16, 8, 4, 2, 2]
    assert scaler.steps_since_growth == 0
    assert DynamicLossScaler().scale == 2.0**15
    with pytest.raises(ValueError, match=r"initial_scale is 0\.5"):
        DynamicLossScalerConfig(initial_scale=0.5)
