"""Chunked log-probs and entropies against plain float64 softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upweight.ops.logprobs import target_logprobs

VOCAB, HIDDEN = 23, 8


def inputs(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    hidden = rng.normal(size=(count, HIDDEN)).astype(np.float32)
    head = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    return hidden, head, rng.integers(0, VOCAB, count), rng.choice([0.6, 1.0, 1.7], count).astype(np.float32)


def expected(hidden: np.ndarray, head: np.ndarray, target: np.ndarray, temperature: np.ndarray) -> tuple:
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T / temperature[:, None]
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return logp[np.arange(len(target)), target], -(np.exp(logp) * logp).sum(1), logp


@pytest.mark.parametrize("count", [1, 64, 256, 300, 512])
def test_values_and_gradient_for_any_number_of_targets(count: int) -> None:
    hidden, head, target, temperature = inputs(count)
    want, spread, logp = expected(hidden, head, target, temperature)

    def total(hidden: jax.Array) -> tuple[jax.Array, tuple]:
        lp, entropy = target_logprobs(hidden, jnp.asarray(head), target, temperature, entropy=True)
        return jnp.sum(lp) + 2 * jnp.sum(entropy), (lp, entropy)

    gradient, (lp, entropy) = jax.jit(jax.grad(total, has_aux=True))(hidden)
    np.testing.assert_allclose(lp, want, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(entropy, spread, rtol=1e-5, atol=2e-6)
    p = np.exp(logp)
    by_logit = np.eye(VOCAB)[target] - p - 2 * p * (logp + spread[:, None])
    np.testing.assert_allclose(gradient, by_logit / temperature[:, None] @ head, rtol=1e-4, atol=2e-5)


def test_a_logit_of_minus_infinity_leaves_entropy_and_gradients_finite() -> None:
    """A vocabulary entry whose logit is −inf everywhere is as good as absent."""
    hidden, head, target, temperature = inputs(5)
    hidden[:, 0] = 1.0
    target %= VOCAB - 1
    closed = head.copy()
    closed[-1] = 0.0
    closed[-1, 0] = -np.inf

    def run(head: np.ndarray) -> tuple:
        def total(hidden: jax.Array) -> tuple[jax.Array, tuple]:
            lp, entropy = target_logprobs(hidden, jnp.asarray(head), target, temperature, entropy=True)
            return jnp.sum(lp) + jnp.sum(entropy), (lp, entropy)

        gradient, (lp, entropy) = jax.grad(total, has_aux=True)(hidden)
        return lp, entropy, gradient[:, 1:]

    for with_closed, without in zip(run(closed), run(head[:-1]), strict=True):
        np.testing.assert_allclose(with_closed, without, rtol=1e-5, atol=1e-6)


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    hidden, head, target, temperature = inputs(64)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, head)]
    lp, _ = target_logprobs(*low, target, temperature)
    want, _, _ = expected(*(np.asarray(x.astype(jnp.float32)) for x in low), target, temperature)
    assert lp.dtype == jnp.float32
    np.testing.assert_allclose(lp, want, rtol=1e-5, atol=2e-6)
