from pathlib import Path

import pytest

from upweight.demo.record import DemoOptions, RunRecord, load_record, record_file
from upweight.demo.run import start_record
from upweight.errors import ConfigError, ModelNotFound


def test_a_record_survives_writing_and_reading(tmp_path: Path) -> None:
    record = RunRecord(options=DemoOptions(seed=3, lora=False), run_id="ab", batches=7, job_id="j")
    record.save(tmp_path)
    assert load_record(tmp_path) == record


def test_resuming_keeps_options_and_plan(tmp_path: Path) -> None:
    RunRecord(options=DemoOptions(seed=3), run_id="ab", batches=7).save(tmp_path)
    resumed = start_record(tmp_path, DemoOptions(seed=0), resume=True)
    assert (resumed.options.seed, resumed.batches, resumed.run_id) == (3, 7, "ab")


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        start_record(tmp_path, DemoOptions(), resume=True)
    RunRecord(options=DemoOptions(), run_id="ab", finished=True).save(tmp_path)
    with pytest.raises(ConfigError, match="complete"):
        start_record(tmp_path, DemoOptions(), resume=True)


def test_unreadable_record_names_the_file(tmp_path: Path) -> None:
    record_file(tmp_path).parent.mkdir()
    record_file(tmp_path).write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        load_record(tmp_path)


def test_unknown_model_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="Qwen/Nothing is not in the local cache"):
        start_record(tmp_path, DemoOptions(model="Qwen/Nothing"), resume=False)
    assert load_record(tmp_path) is None
