from dataclasses import replace

from upweight.demo.report import Result, ledger_adds_up, mechanics_problems

GOOD = Result(
    eval_before=0.3,
    eval_after=0.6,
    p_value=0.001,
    eval_tasks=128,
    reward_first=0.1,
    reward_last=0.5,
    batches=2,
    versions=2,
    samples_trained=64,
    mismatch_max=3e-5,
    ledger_ok=True,
    seconds=1.0,
    cpu_seconds=1.0,
    peak_memory_bytes=1,
    weights="w",
)


def test_sound_run_has_no_problems() -> None:
    assert mechanics_problems(GOOD, ["a", "b"], [1e-5, 3e-5], 2) == []


def test_each_unsound_thing_is_named() -> None:
    cases = [
        (GOOD, ["a", "a"], [1e-5, 1e-5], 2, "same fingerprint"),
        (GOOD, ["a", "b"], [1e-5, None], 2, "no mismatch figure"),
        (replace(GOOD, mismatch_max=0.01), ["a", "b"], [1e-5, 0.01], 2, "differ by 1.0e-02"),
        (replace(GOOD, ledger_ok=False), ["a", "b"], [1e-5, 1e-5], 2, "does not add up"),
        (GOOD, ["a", "b"], [1e-5, 1e-5], 3, "3 batches were planned, 2 filled, 2 versions made"),
    ]
    for result, fingerprints, mismatch, batches, said in cases:
        assert any(said in problem for problem in mechanics_problems(result, fingerprints, mismatch, batches))


def test_ledger() -> None:
    ledger = {"accepted": 64, "trained": 60, "zero_advantage": 3, "masked": 1, "stale": 0, "refused": 0}
    assert ledger_adds_up(ledger | {"not_yet_trained": 0}, 64)
    assert not ledger_adds_up(ledger | {"not_yet_trained": 0}, 96)
    assert not ledger_adds_up(ledger | {"not_yet_trained": 0, "trained": 59}, 64)
    assert not ledger_adds_up(ledger | {"not_yet_trained": 1}, 64)
