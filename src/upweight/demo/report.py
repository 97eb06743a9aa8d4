"""What a demo run came to: the numbers, whether it succeeded, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from upweight.demo.evaluation import Evaluation, has_improved, paired_p_value
from upweight.demo.monitor import Monitor
from upweight.demo.plan import MISMATCH_LIMIT, DemoPlan
from upweight.demo.record import RunRecord
from upweight.demo.sums import SumTask

EXAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Result:
    """The object on the last line of `--json`."""

    eval_before: float
    eval_after: float
    p_value: float
    eval_tasks: int
    reward_first: float | None
    reward_last: float | None
    batches: int
    versions: int
    samples_trained: int
    mismatch_max: float | None
    ledger_ok: bool
    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    weights: str | None


@dataclass(frozen=True, kw_only=True)
class Report:
    result: Result
    problems: list[str]  # empty = success
    examples: list[tuple[str, str, str]]  # question, answer before, answer after

    @property
    def succeeded(self) -> bool:
        return not self.problems


def make_report(
    record: RunRecord,
    plan: DemoPlan,
    tasks: Sequence[SumTask],
    before: Evaluation,
    after: Evaluation,
    monitor: Monitor,
) -> Report:
    job = monitor.job
    versions = [v for v in job.get("versions", []) if v["version"] > 0]
    metrics = [v["metrics"] for v in versions]
    rewards = [m["reward_mean"] for m in metrics if "reward_mean" in m]
    mismatch = [m.get("mismatch_max") for m in metrics]
    known = [m for m in mismatch if m is not None]
    ledger = job.get("ledger", {})
    batches = record.batches or 0
    result = Result(
        eval_before=before.score,
        eval_after=after.score,
        p_value=paired_p_value(before.right, after.right),
        eval_tasks=len(before.right),
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        batches=int(job.get("filled_batches") or 0),
        versions=len(versions),
        samples_trained=int(ledger.get("trained", 0)),
        mismatch_max=max(known, default=None),
        ledger_ok=ledger_adds_up(ledger, batches * plan.batch_size),
        seconds=0.0,
        cpu_seconds=0.0,
        peak_memory_bytes=monitor.peak_memory_bytes,
        weights=job.get("weights"),
    )
    problems = mechanics_problems(result, [v["fingerprint"] for v in versions], mismatch, batches)
    if not record.options.quick and not has_improved(before, after):
        problems.append(
            f"the held-out score did not rise significantly: {before.score:.3f} → {after.score:.3f}, "
            f"p = {result.p_value:.2g} (needed: +0.10 and p < 0.01)"
        )
    return Report(result=result, problems=problems, examples=_examples(tasks, before, after))


def ledger_adds_up(ledger: dict[str, int], expected: int) -> bool:
    """Every accepted sample has one fate, none is left over, and as many were accepted as planned."""
    fates = ("trained", "zero_advantage", "masked", "stale", "refused")
    return (
        ledger.get("accepted") == expected
        and ledger.get("not_yet_trained") == 0
        and sum(ledger.get(fate, 0) for fate in fates) == expected
    )


def mechanics_problems(
    result: Result, fingerprints: Sequence[str], mismatch: Sequence[float | None], batches: int
) -> list[str]:
    """What must hold whether or not the model learned. (The job fails by itself when a fingerprint does not match.)"""
    problems = []
    if result.versions != batches or result.batches != batches:
        problems.append(f"{batches} batches were planned, {result.batches} filled, {result.versions} versions made")
    if len(set(fingerprints)) != len(fingerprints):
        problems.append("two versions have the same fingerprint: an update changed nothing")
    if any(value is None for value in mismatch):
        problems.append("a version has no mismatch figure: no token of it was sampled on-policy")
    if result.mismatch_max is not None and result.mismatch_max > MISMATCH_LIMIT:
        problems.append(
            f"sampler and trainer differ by {result.mismatch_max:.1e}; fp32 noise is below {MISMATCH_LIMIT}"
        )
    if not result.ledger_ok:
        problems.append("the ledger of samples does not add up")
    return problems


def _examples(tasks: Sequence[SumTask], before: Evaluation, after: Evaluation) -> list[tuple[str, str, str]]:
    """A few held-out tasks: first those that became right, then any that became wrong, then others."""
    order = sorted(range(len(tasks)), key=lambda i: (before.right[i] or not after.right[i], not before.right[i], i))
    return [(tasks[i].question, before.texts[i], after.texts[i]) for i in order[:EXAMPLES]]


def as_dict(result: Result) -> dict[str, object]:
    return asdict(result)
