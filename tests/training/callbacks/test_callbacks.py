"""Callbacks driven as the documented loop drives them: `trainer=None`, and from the two hooks of a batch alone."""

import inspect
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from upweight.training.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointConfig,
    EarlyStopping,
    EarlyStoppingConfig,
    JAXProfiler,
    JsonlLogger,
    LoggerCallback,
    LoggerCallbackConfig,
    MemoryProfileConfig,
    MemoryProfiler,
    MlflowLoggerCallback,
    MlflowLoggerConfig,
    ModelCheckpoint,
    ProfilingConfig,
    ProgressBarCallback,
    ProgressBarConfig,
    TensorBoardLoggerCallback,
    TensorBoardLoggerConfig,
    TrackioLoggerCallback,
    TrackioLoggerConfig,
    TrainerLike,
    TrainingCallback,
    WandbLoggerCallback,
    WandbLoggerConfig,
    load_model,
    save_model,
    tracked,
)

HOOKS = {
    "on_train_begin": {},
    "on_train_end": {},
    "on_epoch_begin": {"epoch": 3},
    "on_epoch_end": {"epoch": 3, "logs": {"x": 1.0}},
    "on_batch_begin": {"batch": 5},
    "on_batch_end": {"batch": 5, "logs": {"x": 1.0}},
    "on_validation_begin": {},
    "on_validation_end": {"logs": {"x": 1.0}},
}


class Recorder(BaseCallback):
    def __init__(self, name: str, calls: list[tuple[str, str, Any]]) -> None:
        self.name, self.calls = name, calls

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *args: self.calls.append((self.name, name, args))


def loop(callback: Any, values: list[float], name: str = "total_loss") -> None:
    callbacks = CallbackList([callback])
    for step, value in enumerate(values):
        callbacks.on_batch_begin(None, step)
        callbacks.on_batch_end(None, step, {name: jnp.float32(value)})


def test_the_list_calls_all_in_order() -> None:
    calls: list[tuple[str, str, Any]] = []
    callbacks = CallbackList([Recorder("a", calls), Recorder("b", calls)])
    for hook, arguments in HOOKS.items():
        getattr(callbacks, hook)("trainer", **arguments)
        assert calls[-2:] == [(name, hook, ("trainer", *arguments.values())) for name in "ab"]
    assert (len(callbacks), [c.name for c in callbacks]) == (2, ["a", "b"])
    callbacks.remove(callbacks.callbacks[0])
    callbacks.add(Recorder("c", calls))
    assert [c.name for c in callbacks] == ["b", "c"]


def test_c25_the_list_is_a_copy() -> None:
    mine: list[Any] = [BaseCallback()]
    callbacks = CallbackList(mine)
    callbacks.add(BaseCallback())
    assert len(mine) == 1
    assert not hasattr(callbacks, "__dict__")


def test_t8_parameter_names_are_those_of_the_protocol() -> None:
    for hook, arguments in HOOKS.items():
        wanted = list(inspect.signature(getattr(TrainingCallback, hook)).parameters)
        for kind in (BaseCallback, CallbackList, EarlyStopping, ModelCheckpoint, LoggerCallback, MemoryProfiler):
            assert list(inspect.signature(getattr(kind, hook)).parameters) == wanted, (kind, hook)
        getattr(BaseCallback(), hook)(trainer=None, **arguments)
    assert isinstance(BaseCallback(), TrainingCallback)
    assert isinstance(SimpleNamespace(model=1), TrainerLike)


@pytest.mark.parametrize(
    ("config", "values", "stops_at"),
    [
        ({"patience": 2}, [1.0, 0.9, 0.95, 0.91, 0.5], 3),
        ({"patience": 2, "mode": "max"}, [1.0, 1.1, 1.0, 1.05], 3),
        ({"patience": 1, "min_delta": 0.2}, [1.0, 0.9], 1),
        ({"patience": 9}, [1.0, float("nan"), 0.5], 1),
        ({"patience": 9, "check_finite": False}, [1.0, float("nan"), 0.5], None),
        ({"stopping_threshold": 0.5}, [1.0, 0.5, 0.4], 1),
        ({"stopping_threshold": 2.0, "mode": "max"}, [1.0, 2.0], 1),
        ({"divergence_threshold": 5.0}, [1.0, 5.0], 1),
        ({"divergence_threshold": -5.0, "mode": "max"}, [1.0, -6.0], 1),
        ({"patience": 3}, [1.0, 0.9, 0.8, 0.7], None),
    ],
)
def test_t9_early_stopping_from_batches_and_epochs(
    config: dict[str, Any], values: list[float], stops_at: int | None
) -> None:
    by_batch = EarlyStopping(EarlyStoppingConfig(monitor="total_loss", **config))
    loop(by_batch, values)
    by_epoch = EarlyStopping(EarlyStoppingConfig(**config))
    for epoch, value in enumerate(values):
        by_epoch.on_batch_end(None, epoch, {"other": 0.0})
        by_epoch.on_epoch_end(None, epoch, {"val_loss": value})
    for stopping in (by_batch, by_epoch):
        assert stopping.should_stop == (stops_at is not None)
        assert stopping.stopped_epoch == (stops_at or 0)


def test_early_stopping_keeps_its_signal_and_its_best() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(monitor="total_loss", patience=1))
    loop(stopping, [1.0, 0.5, 0.6, 0.1])
    assert stopping.should_stop
    assert (stopping.best_score, stopping.wait_count, stopping.stopped_epoch) == (0.5, 1, 2)
    with pytest.raises(ValueError, match="mode is 'least'"):
        EarlyStoppingConfig(mode="least")


class Model(nnx.Module):
    def __init__(self, value: float) -> None:
        self.weight = nnx.Param(jnp.full((2, 3), value))
        self.parts = nnx.List([nnx.Param(jnp.arange(2.0))])
        self.noise = nnx.Rngs(0)


def test_t9_checkpoints_from_batches(tmp_path: Path) -> None:
    model = Model(0.0)
    checkpoint = ModelCheckpoint(CheckpointConfig(tmp_path, monitor="total_loss", save_top_k=2), model=model)
    callbacks = CallbackList([checkpoint])
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 5.0]):
        model.weight[...] = jnp.full((2, 3), float(step))
        callbacks.on_batch_end(None, step, {"total_loss": loss})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["batch-000001", "batch-000002"]
    assert (checkpoint.best_score, checkpoint.best_model_path) == (1.0, tmp_path / "batch-000001")
    fresh = Model(9.0)
    load_model(tmp_path / "batch-000001", fresh)
    np.testing.assert_array_equal(fresh.weight[...], np.ones((2, 3)))


def test_checkpoints_of_epochs_and_what_is_not_saved(tmp_path: Path) -> None:
    trainer = SimpleNamespace(model=Model(1.0))
    every = ModelCheckpoint(CheckpointConfig(tmp_path / "all", mode="max", save_top_k=-1, every_n_epochs=2))
    none = ModelCheckpoint(CheckpointConfig(tmp_path / "none", save_top_k=0))
    for epoch in range(4):
        for checkpoint in (every, none):
            checkpoint.on_epoch_end(trainer, epoch, {"val_loss": float(epoch)})
            checkpoint.on_epoch_end(trainer, epoch, {"other": 0.0})
    assert [saved.path.name for saved in every.saved] == ["epoch-000003", "epoch-000001"]
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="has no model to save"):
        ModelCheckpoint(CheckpointConfig(tmp_path)).on_epoch_end(None, 0, {"val_loss": 1.0})


class Interrupted(Exception):
    pass


def test_the_old_model_goes_once_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = tmp_path / "epoch-000000", Model(9.0)

    def interrupt(*_: Any, **__: Any) -> None:
        raise Interrupted

    def loaded() -> float:
        load_model(path, found)
        return float(found.weight[0, 0])

    save_model(path, Model(1.0))
    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.PyTreeCheckpointHandler.save", interrupt)
        with pytest.raises(Interrupted):
            save_model(path, Model(2.0))
    assert loaded() == 1.0
    path.rename(tmp_path / "epoch-000000.old")  # as a kill between the two renames leaves them
    save_model(tmp_path / "epoch-000000.new", Model(2.0))
    assert loaded() == 2.0
    save_model(path, Model(3.0))
    assert loaded() == 3.0
    assert [each.name for each in tmp_path.iterdir() if "orbax" not in each.name] == ["epoch-000000"]


class Log:
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.lines.append((step, metrics))


def test_loggers_of_several_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    loop(LoggerCallback(log, LoggerCallbackConfig(log_every_n_steps=2, prefix="train/")), [1.0, 2.0, 3.0])
    assert log.lines == [(0, {"train/total_loss": 1.0}), (2, {"train/total_loss": 3.0})]
    single: list[Any] = []
    loop(LoggerCallback(SimpleNamespace(log_scalar=lambda *line: single.append(line))), [1.0])
    loop(LoggerCallback(lambda metrics, step: single.append((metrics, step))), [2.0])
    assert single == [("total_loss", 1.0, 0), ({"total_loss": 2.0}, 0)]
    loop(LoggerCallback(JsonlLogger(tmp_path / "deep" / "log.jsonl")), [1.0, 2.0])
    lines = [json.loads(line) for line in (tmp_path / "deep" / "log.jsonl").read_text().splitlines()]
    assert lines == [{"step": 0, "total_loss": 1.0}, {"step": 1, "total_loss": 2.0}]
    skipped = JsonlLogger(tmp_path / "skipped.jsonl")
    skipped.log_scalars({"loss": float("nan"), "norm": float("inf"), "low": -float("inf"), "update_skipped": 1.0}, 4)
    assert skipped.path.read_text() == '{"step": 4, "update_skipped": 1.0}\n'
    with caplog.at_level(logging.INFO):
        loop(LoggerCallback(logging.getLogger("loop")), [0.5])
    assert "step 0 total_loss=0.5" in caplog.text
    with pytest.raises(TypeError, match="has no log_scalars"):
        LoggerCallback(3)
    with pytest.raises(ValueError, match="log_every_n_steps is 0"):
        LoggerCallbackConfig(log_every_n_steps=0)


def test_trackers_start_with_the_first_metric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The far sides are stand-ins that record; the libraries themselves are not among the test dependencies."""
    run, writer, seen = Log(), SimpleNamespace(rows=[], closed=False), {}
    run.finish = lambda: seen.update(finished=True)  # type: ignore[attr-defined]
    writer.add_scalar = lambda *row: writer.rows.append(row)
    writer.close = lambda: setattr(writer, "closed", True)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **kw: seen.update(kw) or run))
    board = SimpleNamespace(SummaryWriter=lambda folder, **kw: seen.update(folder=folder, **kw) or writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    wandb = WandbLoggerCallback(WandbLoggerConfig("project", mode="offline", log_dir=tmp_path))
    tensorboard = TensorBoardLoggerCallback(TensorBoardLoggerConfig(log_dir=tmp_path, flush_secs=3))
    for callback in (wandb, tensorboard):
        loop(callback, [1.0, 2.0])
        callback.on_train_end(None)
    assert run.lines == [(0, {"total_loss": 1.0}), (1, {"total_loss": 2.0})]
    assert writer.rows == [("total_loss", 1.0, 0), ("total_loss", 2.0, 1)]
    assert writer.closed
    assert (seen["project"], seen["mode"], seen["dir"], seen["finished"]) == ("project", "offline", str(tmp_path), True)
    assert (seen["folder"], seen["flush_secs"], seen["max_queue"]) == (str(tmp_path), 3, 10)


@pytest.mark.parametrize(
    ("callback", "module", "extra"),
    [
        (WandbLoggerCallback(WandbLoggerConfig("project")), "wandb", "wandb"),
        (TensorBoardLoggerCallback(), "tensorboardX", "tensorboard"),
        (MlflowLoggerCallback(MlflowLoggerConfig("experiment")), "mlflow", "mlflow"),
        (TrackioLoggerCallback(TrackioLoggerConfig("project")), "trackio", "trackio"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_tracker_that_is_not_installed_is_named(
    callback: Any, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"^{module} is not installed; run: pip install 'upweight\[{extra}\]'$"):
        loop(callback, [1.0])


def test_metrics_are_always_on_disk(tmp_path: Path) -> None:
    calls: list[tuple[str, str, Any]] = []
    callbacks = tracked(tmp_path / "run", Recorder("a", calls))
    loop(callbacks, [0.5, 0.25])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 0, "total_loss": 0.5}, {"step": 1, "total_loss": 0.25}]
    assert len(calls) == 4  # the others are called as well


def test_the_progress_bar_shows_steps_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBarCallback(total=3)
    loop(bar, [0.25, 0.5])
    bar.on_train_end(None)
    assert "2/3" in (shown := capsys.readouterr().out)
    assert "total_loss 0.5" in shown
    loop(ProgressBarCallback(ProgressBarConfig(disable=True)), [1.0])
    assert capsys.readouterr().out == ""


def test_profilers_write_files(tmp_path: Path) -> None:
    memory = MemoryProfiler(MemoryProfileConfig(tmp_path / "memory", profile_every_n_steps=2))
    loop(memory, [1.0, 1.0, 1.0])
    lines = [json.loads(line) for line in (tmp_path / "memory" / "memory.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2]
    assert lines[0]["resident_bytes"] > 1 << 20
    profiler = JAXProfiler(ProfilingConfig(tmp_path / "trace", start_step=1, end_step=2))
    loop(profiler, [1.0, 1.0, 1.0])
    assert [path for path in (tmp_path / "trace").rglob("*") if path.is_file()]
    with pytest.raises(ValueError, match="start_step is 5 and end_step 5"):
        ProfilingConfig(start_step=5, end_step=5)
