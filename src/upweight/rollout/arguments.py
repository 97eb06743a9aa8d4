"""What a runner is given, looked at before anything starts: one line names the argument, its value and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from upweight.rollout.evaluation import EvaluationPlan

SHOWN_CHARS = 80


def check_arguments(rollout_fn: object, dataset: object) -> None:
    """Raises TypeError for a function that cannot be called and a dataset that gives no tasks."""
    if not callable(rollout_fn):
        raise TypeError(
            f"rollout_fn is {_shown(rollout_fn)}, which cannot be called; give a function of task and context"
        )
    if isinstance(dataset, type):
        raise TypeError(f"dataset is the class {dataset.__name__}; give an object of it: {dataset.__name__}(…)")
    if not callable(getattr(dataset, "sample", None)):
        wrap = "; wrap it in SequenceDataset of upweight.rollout.datasets" if isinstance(dataset, Iterable) else ""
        raise TypeError(f"dataset is {_shown(dataset)}, which has no method sample(n){wrap}")


def plan_evaluation(
    eval_dataset: Iterable[Any] | None, eval_every: int | None, eval_fn: Callable[..., Any] | None
) -> EvaluationPlan | None:
    """The plan that the three arguments make; None if none of them is given.

    Raises:
        ValueError: one is missing, or `eval_every` is below 1.
        TypeError: `eval_fn` cannot be called, or `eval_dataset` cannot be gone through.
    """
    if eval_every is not None and (isinstance(eval_every, bool) or not isinstance(eval_every, int) or eval_every < 1):
        raise ValueError(
            f"eval_every is {_shown(eval_every)}; it must be a whole number of versions from 1, or None for both ends only"
        )
    given = {"eval_dataset": eval_dataset, "eval_fn": eval_fn}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and eval_every is None:
        return None
    if missing:
        present = [name for name in given if name not in missing] or [f"eval_every={eval_every}"]
        raise ValueError(
            f"{' and '.join(missing)} missing beside {present[0]}; an evaluation needs both, or none of the three"
        )
    if not callable(eval_fn):
        raise TypeError(f"eval_fn is {_shown(eval_fn)}, which cannot be called; give a function of task and context")
    if not isinstance(eval_dataset, Iterable):
        raise TypeError(
            f"eval_dataset is {_shown(eval_dataset)}, which is no list of tasks; give one, or any iterable that ends"
        )
    tasks = list(eval_dataset)
    if not tasks:
        raise ValueError("eval_dataset is empty; give at least one task, or none of the three")
    return EvaluationPlan(tasks, eval_fn, eval_every)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
