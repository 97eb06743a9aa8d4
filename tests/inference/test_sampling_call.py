"""`sample`: the numbers of each step, and that nothing is changed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upweight.errors import RequestError
from upweight.inference import sample

LOGITS = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], np.float32))


def frequencies(n: int = 20_000, **settings: object) -> np.ndarray:
    rows = np.repeat(LOGITS, n, axis=0)
    tokens = np.asarray(sample(rows, key=jax.random.key(1), **settings))
    return np.bincount(tokens, minlength=4) / n


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.0}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, np.array([25, 6.25, 2.25, 1]) / 34.5),
        ({"top_k": 2, "filter_value": math.log(0.25)}, [0.4, 0.2, 0.2, 0.2]),
    ],
)
def test_frequencies(settings: dict, expected: list[float]) -> None:
    np.testing.assert_allclose(frequencies(**settings), expected, atol=0.012)


def test_penalty_counts_masked_occurrences_after_the_filters() -> None:
    ids, mask = np.array([[0, 0, 3]]), np.array([[True, True, False]])
    tokens, logprobs = sample(LOGITS, 0.5, 2, 1.0, 0.7, ids, mask, return_logprobs=True, key=jax.random.key(0))
    # Kept are 0 and 1 with probabilities ∝ 0.25 and 0.0625 at T = 0.5; twice 0.7 is taken from the first, not divided by T.
    weights = np.array([0.25 * math.exp(-1.4), 0.0625])
    assert float(logprobs[0]) == pytest.approx(math.log(weights[int(tokens[0])] / weights.sum()), abs=1e-6)
    greedy, raw = sample(LOGITS, 0, 0, 1.0, 0.7, ids, mask, return_logprobs=True)
    assert greedy.tolist() == [1]
    assert float(raw[0]) == pytest.approx(math.log(0.25), abs=1e-6)


def test_nothing_is_changed_and_a_key_repeats() -> None:
    for given in (np.tile(LOGITS, (8, 1)), jnp.tile(jnp.asarray(LOGITS), (8, 1))):
        before = np.array(given)
        first = sample(given, 0.7, 3, 0.9, 0.5, np.array([[0, 1]] * 8), key=3)
        assert sample(given, 0.7, 3, 0.9, 0.5, np.array([[0, 1]] * 8), key=3).tolist() == first.tolist()
        np.testing.assert_array_equal(np.asarray(given), before)
    drawn = {tuple(sample(np.zeros((4, 1000))).tolist()) for _ in range(3)}
    assert len(drawn) == 3
    assert sample(LOGITS[0], 0).tolist() == [0]
    rows = sample(np.tile(LOGITS, (2, 1)), [0, 1], [0, 1], [1.0, 1.0])
    assert rows.tolist() == [0, 0]


def test_bad_settings_are_named() -> None:
    with pytest.raises(RequestError, match=r"temperature is -1\.0"):
        sample(LOGITS, -1)
    with pytest.raises(RequestError, match=r"top_p is \[1\.5\]"):
        sample(LOGITS, top_p=1.5)
