"""Filters and draws against float64 references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upweight.ops.sampling import Adjustments, SamplingInputs, apply_filters, draw

VOCAB = 400
filters = jax.jit(apply_filters)
plain_draw = jax.jit(lambda logits, inputs: draw(logits, inputs, filtered=False))
filtered_draw = jax.jit(lambda logits, inputs: draw(logits, inputs, filtered=True))


def reference_kept(x: np.ndarray, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """bool [V] by sorting everything in float64."""
    x = x.astype(np.float64)
    kept = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        kept = x >= np.sort(x)[-top_k]
    if top_p < 1:
        p = np.where(kept, np.exp(x - x.max()), 0)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        reached = np.cumsum(p[order]) >= top_p
        last = order[int(np.argmax(reached))] if reached.any() else order[-1]
        kept &= x >= x[last]
    if min_p > 0:
        kept &= np.exp(x - x.max()) >= min_p
    return kept


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    top_k=st.sampled_from([0, 1, 2, 50, 128, 129, 300, VOCAB, 9999]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_kept_sets_are_those_of_a_full_sort(seed: int, spread: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal((2, VOCAB)) * spread).astype(np.float32)
    kept = np.isfinite(
        np.asarray(
            filters(logits, np.full(2, top_k, np.int32), np.full(2, top_p, np.float32), np.full(2, min_p, np.float32))
        )
    )
    for row in range(2):
        expected = reference_kept(logits[row], top_k, top_p, min_p)
        # Rounding of the cumulative sum may move the border by one token of its own probability.
        assert abs(int(kept[row].sum()) - int(expected.sum())) <= 1
        assert kept[row].sum() >= 1
        assert logits[row][kept[row]].min() >= logits[row][~kept[row]].max(initial=-np.inf)


def inputs(rows: int, **given: float) -> SamplingInputs:
    return SamplingInputs(
        temperature=np.full(rows, given.get("temperature", 1.0), np.float32),
        top_k=np.full(rows, given.get("top_k", 0), np.int32),
        top_p=np.full(rows, given.get("top_p", 1.0), np.float32),
        min_p=np.full(rows, given.get("min_p", 0.0), np.float32),
        seed=np.stack([np.zeros(rows), np.arange(rows)], axis=1).astype(np.uint32),
        drawn=np.zeros(rows, np.int32),
        alternatives=np.full(rows, bool(given.get("alternatives", False))),
    )


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 200, "top_p": 0.9}]
)
def test_draws_follow_the_reported_distribution(given: dict[str, float]) -> None:
    rows = 20_000
    logits = np.random.default_rng(3).standard_normal(VOCAB).astype(np.float32) * 2
    out = filtered_draw(np.broadcast_to(logits, (rows, VOCAB)), inputs(rows, **given))
    x = logits.astype(np.float64) / given.get("temperature", 1.0)
    kept = reference_kept(x, int(given.get("top_k", 0)), given.get("top_p", 1.0))
    p = np.where(kept, np.exp(x - x.max()), 0)
    p /= p.sum()
    tokens = np.asarray(out.token)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[~kept].sum() == 0
    common = p * rows >= 5
    rest = ~common
    observed = np.append(counts[common], counts[rest].sum())
    expected = np.append(p[common], p[rest].sum()) * rows
    chi2 = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
    freedom = len(observed) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(np.asarray(out.logprob), np.log(p[tokens]), atol=1e-5)
    raw = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    np.testing.assert_allclose(np.asarray(out.raw_logprob), raw[tokens], atol=1e-5)
    tempered = x - np.log(np.exp(x).sum())
    np.testing.assert_allclose(np.asarray(out.tempered_logprob), tempered[tokens], atol=1e-5)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = np.full((1000, VOCAB), -np.inf, np.float32)
    logits[:, [7, 399]] = 0.0
    tokens = np.asarray(plain_draw(logits, inputs(1000)).token)
    assert set(tokens.tolist()) == {7, 399}


def test_rows_draw_by_their_own_seed_and_count_only() -> None:
    logits = np.random.default_rng(0).standard_normal((4, VOCAB)).astype(np.float32)
    one = inputs(4)
    first = np.asarray(plain_draw(logits, one).token)
    order = np.array([2, 0, 3, 1])
    shuffled = SamplingInputs(*(np.asarray(x)[order] for x in one))
    assert np.asarray(plain_draw(logits[order], shuffled).token).tolist() == first[order].tolist()
    later = one._replace(drawn=np.ones(4, np.int32))
    assert np.asarray(plain_draw(logits, later).token).tolist() != first.tolist()


def test_greedy_takes_the_lowest_of_equal_ids_and_reports_the_raw_value() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, [5, 9]] = 3.0
    out = filtered_draw(logits, inputs(2, temperature=0.0, top_k=1, top_p=0.1))
    expected = 3.0 - np.log(2 * np.exp(3.0) + VOCAB - 2)
    assert np.asarray(out.token).tolist() == [5, 5]
    np.testing.assert_allclose(out.logprob, expected, atol=1e-5)
    np.testing.assert_allclose(out.raw_logprob, expected, atol=1e-5)
    np.testing.assert_allclose(out.tempered_logprob, expected, atol=1e-5)


def changes(**given: object) -> Adjustments:
    """Adjustments of one row; nothing changes unless given."""
    fields = {
        "bias_ids": [[-1]], "bias": [[0.0]], "recent_ids": [[-1]], "counts": [[0.0]],
        "repetition": [1.0], "frequency": [0.0], "presence": [0.0],
    } | given  # fmt: skip
    return Adjustments(**{name: jnp.asarray(value) for name, value in fields.items()})


def logprobs_of(x: list[float]) -> np.ndarray:
    return np.array(x) - np.log(np.exp(np.array(x)).sum())


def test_penalties_count_occurrences_after_filters_and_are_not_divided_by_temperature() -> None:
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
    given = changes(
        recent_ids=[[0, 2]], counts=[[2.0, 1.0]], frequency=[0.5], presence=[0.25], bias_ids=[[3]], bias=[[-jnp.inf]]
    )
    out = draw(logits, inputs(1, temperature=0.5), given, filtered=False)
    expected = logprobs_of([2.0 / 0.5 - 2 * 0.5 - 0.25, 1.0 / 0.5, 0.0 / 0.5 - 0.5 - 0.25, -np.inf])
    assert float(out.logprob[0]) == pytest.approx(expected[int(out.token[0])], abs=1e-6)
    greedy = draw(logits, inputs(1, temperature=0.0), given._replace(frequency=jnp.asarray([0.6])), filtered=False)
    assert int(greedy.token[0]) == 1  # 2 − 1.2 − 0.25 < 1
    raw = logprobs_of([2.0, 1.0, 0.0, -1.0])[1]
    assert float(greedy.logprob[0]) == pytest.approx(raw, abs=1e-6)


def test_bias_comes_before_the_repetition_penalty_and_both_before_temperature() -> None:
    logits = jnp.asarray([[2.0, 1.0, -0.5, -1.0]])
    given = changes(
        bias_ids=[[0, 1]], bias=[[1.0, -3.0]], recent_ids=[[0, 1, 2]], counts=[[1.0, 1.0, 4.0]], repetition=[2.0]
    )
    out = draw(logits, inputs(1, temperature=0.5), given, filtered=False)
    expected = logprobs_of([(2.0 + 1.0) / 2 / 0.5, (1.0 - 3.0) * 2 / 0.5, -0.5 * 2 / 0.5, -1.0 / 0.5])
    assert float(out.logprob[0]) == pytest.approx(expected[int(out.token[0])], abs=1e-6)
    drawn = int(out.token[0])
    assert float(out.raw_logprob[0]) == pytest.approx(logprobs_of([2.0, 1.0, -0.5, -1.0])[drawn], abs=1e-6)
    assert float(out.tempered_logprob[0]) == pytest.approx(logprobs_of([4.0, 2.0, -1.0, -2.0])[drawn], abs=1e-6)


def test_only_allowed_tokens_are_drawn() -> None:
    rows = 500
    allowed = np.zeros((1, -(-VOCAB // 8)), np.uint8)
    for token in (3, 8, 399):
        allowed[0, token // 8] |= 1 << token % 8
    one = changes(allowed=np.repeat(allowed, rows, 0))
    given = Adjustments(*(jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in one))
    logits = np.random.default_rng(2).standard_normal((rows, VOCAB)).astype(np.float32)
    out = draw(logits, inputs(rows), given, filtered=False)
    assert set(np.asarray(out.token).tolist()) == {3, 8, 399}
    drawn = np.asarray(out.token)
    kept = logits[:, [3, 8, 399]].astype(np.float64)
    expected = logits[np.arange(rows), drawn] - np.log(np.exp(kept).sum(-1))
    np.testing.assert_allclose(np.asarray(out.logprob), expected, atol=1e-5)


def test_alternatives_are_the_likeliest_of_the_distribution_drawn_from() -> None:
    logits = np.random.default_rng(4).standard_normal((2, VOCAB)).astype(np.float32)
    settings_ = inputs(2, temperature=0.5, alternatives=True)._replace(temperature=np.array([0.5, 0.0], np.float32))
    out = draw(logits, settings_, filtered=False, alternatives=True)
    for row, scale in enumerate([0.5, 1.0]):
        expected = logprobs_of(list(logits[row].astype(np.float64) / scale))
        order = np.argsort(-expected)[:20]
        assert np.asarray(out.best_ids)[row].tolist() == order.tolist()
        np.testing.assert_allclose(np.asarray(out.best_logprobs)[row], expected[order], atol=1e-5)


def test_logits_of_the_caller_are_untouched() -> None:
    logits = np.random.default_rng(0).standard_normal((2, VOCAB)).astype(np.float32)
    before = logits.copy()
    filtered_draw(logits, inputs(2, top_k=3))
    np.testing.assert_array_equal(logits, before)


def test_rounding_noise_does_not_change_a_draw() -> None:
    """With a flat distribution over many tokens, noise of 1e-6 in the logits leaves (nearly) every token where it is."""
    rows, vocab = 64, 20_000
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    noisy = logits + rng.uniform(-1e-6, 1e-6, logits.shape).astype(np.float32)
    assert (
        np.asarray(plain_draw(logits, inputs(rows)).token).tolist()
        == np.asarray(plain_draw(noisy, inputs(rows)).token).tolist()
    )


def test_flat_distributions_are_drawn_flat() -> None:
    rows, vocab = 40_000, 256
    tokens = np.asarray(plain_draw(np.zeros((rows, vocab), np.float32), inputs(rows)).token)
    counts = np.bincount(tokens, minlength=vocab)
    chi2 = np.sum((counts - rows / vocab) ** 2) / (rows / vocab)
    assert abs(chi2 - (vocab - 1)) < 5 * np.sqrt(2 * (vocab - 1))
