import pytest

from upweight.demo.evaluation import Evaluation, has_improved, paired_p_value


def outcome(*right: bool) -> Evaluation:
    return Evaluation(list(right), [""] * len(right))


def test_p_value_by_hand() -> None:
    # Three gains, no loss: (1/2)^3. Unchanged tasks say nothing.
    assert paired_p_value([False, False, False, True], [True, True, True, True]) == pytest.approx(0.125)
    # Two gains, one loss of three changed: P(X >= 2) = (3 + 1)/8.
    assert paired_p_value([False, False, True], [True, True, False]) == pytest.approx(0.5)
    assert paired_p_value([True, False], [True, False]) == 1.0
    # Only losses: certain.
    assert paired_p_value([True, True], [False, False]) == 1.0


def test_improvement_needs_both_significance_and_size() -> None:
    before = outcome(*[False] * 200)
    assert has_improved(before, outcome(*[True] * 20, *[False] * 180))  # +0.10, p = 1e-6
    assert not has_improved(before, outcome(*[True] * 19, *[False] * 181))  # significant but +0.095
    small = outcome(*[False] * 10)
    assert not has_improved(small, outcome(*[True] * 3, *[False] * 7))  # +0.3 but p = 0.125
