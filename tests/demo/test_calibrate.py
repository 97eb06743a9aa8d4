from pathlib import Path

from upweight.demo.calibrate import calibrate
from upweight.demo.plan import FEWEST, MOST, DemoPlan
from upweight.demo.record import DemoOptions


def test_a_batch_is_measured_with_the_engine_and_the_trainer_of_the_job(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    speed = calibrate(DemoOptions(model=str(tiny_model_folder)), str(tmp_path))
    assert 0 < speed["token_seconds"] < speed["step_seconds"] < 60


def test_fast_machines_get_most_batches_slow_ones_fewest() -> None:
    plan = DemoPlan(DemoOptions())
    assert plan.fitting_batches(step_seconds=2.0, token_seconds=0.06, elapsed=15.0, eval_tasks=136) == MOST
    assert plan.fitting_batches(step_seconds=30.0, token_seconds=0.06, elapsed=15.0, eval_tasks=136) == FEWEST
    between = plan.fitting_batches(step_seconds=7.0, token_seconds=0.06, elapsed=15.0, eval_tasks=136)
    assert FEWEST < between < MOST
