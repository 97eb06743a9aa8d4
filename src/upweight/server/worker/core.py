"""Engine and trainer of one job in one process; they share parameters and a version number and nothing else.

`train` is hops 6–9 of an item's journey: packed arrays → update → version n + 1 with a fingerprint → the engine swaps to it.
"""

from __future__ import annotations

import logging
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from upweight.errors import TrainingError, UpweightError
from upweight.inference.engine import Engine
from upweight.models.layers import Params
from upweight.online.load_check import check_loaded
from upweight.server.worker.file_rows import load_rows, row_trainer
from upweight.server.worker_protocol import (
    CheckpointResult,
    TrainBatch,
    TrainResult,
    WorkerMode,
    WorkerPhase,
    WorkerSpec,
    WorkerState,
)
from upweight.training.checkpoints import load_checkpoint, save_checkpoint
from upweight.training.policy_trainer import PolicyTrainer, StepReport
from upweight.training.row_trainer import RowTrainer, optimizer_settings
from upweight.training.settings import PolicySettings
from upweight.weights.fingerprint import fingerprint
from upweight.weights.loading import LoadedModel, load_model, save_model

log = logging.getLogger(__name__)


class OutOfOrder(TrainingError):
    """A batch that is not the next one."""


class WorkerCore:
    """Loads on its own thread; `wait_ready` returns when requests can be answered and batches trained."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._phase = WorkerPhase.LOADING
        self._detail = "reading the model"
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._order = threading.Lock()  # one train, checkpoint or export at a time
        self._fingerprint: str | None = None
        self._notes: list[str] = []
        self.model: LoadedModel
        self.engine: Engine
        self.trainer: PolicyTrainer | None = None

    def start(self) -> None:
        threading.Thread(target=self._load, name="load", daemon=True).start()

    def wait_ready(self) -> None:
        """Blocks until loaded; raises what went wrong there."""
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def loaded(self) -> bool:
        return self._ready.is_set() and self._failure is None

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def state(self) -> WorkerState:
        loaded = self.loaded
        return WorkerState(
            phase=self._phase,
            detail=self._detail,
            version=self.engine.version if loaded else None,
            fingerprint=self._fingerprint,
            peak_memory_bytes=peak_memory_bytes(),
            cpu_seconds=time.process_time(),
            notes=self._notes,
            stats=_numbers(self.engine.stats()) if loaded else {},
        )

    def train(self, batch_index: int, batch: TrainBatch | None = None) -> TrainResult:
        """Version batch_index + 1; without a batch from the job's file. `OutOfOrder` when it is not the next one."""
        self.wait_ready()
        trainer = self._need_trainer()
        with self._order:
            if batch_index != trainer.version:
                raise OutOfOrder(f"batch {batch_index} was sent, batch {trainer.version} comes next")
            began = time.monotonic()
            self._enter(WorkerPhase.TRAINING, f"training on batch {batch_index}")
            try:
                report = _train(trainer, batch)
                handed_over, expected = self._hand_over(trainer.policy_params(), report.version)
            finally:
                self._enter(WorkerPhase.READY, "")
            return TrainResult(
                version=report.version,
                fingerprint=handed_over,
                fingerprint_ok=handed_over == expected,
                update_skipped=report.skipped,
                metrics=report.metrics,
                fates=report.fates,
                seconds=time.monotonic() - began,
            )

    def checkpoint(self) -> CheckpointResult:
        """The training state at the present version, complete on disk. Older ones stay: the server drops them once this one is recorded."""
        self.wait_ready()
        trainer = self._need_trainer()
        with self._order:
            self._enter(WorkerPhase.SAVING, f"saving version {trainer.version}")
            try:
                path = save_checkpoint(Path(self.spec.folder) / "checkpoints", trainer)
            finally:
                self._enter(WorkerPhase.READY, "")
            return CheckpointResult(path=str(path), version=trainer.version)

    def export(self, folder: str) -> str:
        """Writes the weights that requests are answered with as a Hugging Face folder."""
        self.wait_ready()
        with self._order:
            model = self.model
            save_model(folder, model.config, model.raw_config, self.engine.runner.params, model.tokenizer)
        return folder

    def _hand_over(self, params: Params, version: int) -> tuple[str, str]:
        """(fingerprint of what the engine decodes with from now on, fingerprint of what the trainer meant)."""
        expected = fingerprint(params)
        self._fingerprint = self.engine.set_weights(params, version)
        return self._fingerprint, expected

    def _need_trainer(self) -> PolicyTrainer:
        if self.trainer is None:
            raise TrainingError("this worker only serves; it has no trainer")
        return self.trainer

    def _enter(self, phase: WorkerPhase, detail: str) -> None:
        self._phase, self._detail = phase, detail

    def _load(self) -> None:
        try:
            self._load_parts()
            self._enter(WorkerPhase.READY, "")
        except UpweightError as error:
            self._failure = error
        except Exception as error:  # raised by wait_ready, to whoever waits
            log.exception("loading failed")
            self._failure = error
        finally:
            self._ready.set()

    def _load_parts(self) -> None:
        spec = self.spec
        self.model = load_model(spec.model)
        params, version = self.model.params, 0
        if spec.mode is WorkerMode.TRAIN or spec.checkpoint is not None:
            trainer = self._load_trainer()
            params, version = trainer.policy_params(), trainer.version
            self.trainer = trainer if spec.mode is WorkerMode.TRAIN else None
        sampling = spec.settings.get("sampling") or {}
        self._enter(WorkerPhase.COMPILING, "starting the engine")
        self.engine = Engine(
            self.model.config,
            params,
            self.model.tokenizer,
            max_rows=spec.max_slots,
            max_context=sampling.get("max_context"),
            max_queue=spec.max_queue,
            version=version,
        )
        if spec.warm_up:
            self._enter(WorkerPhase.COMPILING, f"for requests of up to {spec.warm_up} tokens")
            self.engine.warm_up(spec.warm_up)
        self.engine.start()
        self._fingerprint = self.engine.fingerprint()
        self._enter(WorkerPhase.COMPILING, "comparing engine and trainer")
        check_loaded(self.engine, self.trainer)

    def _new_trainer(self) -> PolicyTrainer:
        """At version 0, of the job's kind; a worker that only serves needs no rows."""
        spec, model = self.spec, self.model
        tokens = spec.settings.get("microbatch_tokens") or 8192
        if spec.method_type == "reinforcement":
            settings = PolicySettings.from_method(spec.settings)
        elif spec.mode is WorkerMode.SERVE or spec.training_file is None:
            settings = optimizer_settings(spec.settings)
        else:
            self._enter(WorkerPhase.LOADING, "reading the training file")
            loaded = load_rows(Path(spec.training_file), spec.method_type, spec.settings, model, self._tell_progress)
            self._notes = loaded.notes
            trainer = row_trainer(spec.method_type, spec.settings, model, loaded.rows, microbatch_tokens=tokens)
            if spec.validation_file is not None:
                self._validate(trainer, Path(spec.validation_file))
            return trainer
        return PolicyTrainer(model.config, model.params, settings, microbatch_tokens=tokens)

    def _validate(self, trainer: RowTrainer, path: Path) -> None:
        spec = self.spec
        settings = {**spec.settings, "rows": spec.settings["validation_rows"]}
        held_out = load_rows(path, spec.method_type, settings, self.model, self._tell_progress)
        self._notes = self._notes + held_out.notes
        every, last = spec.settings["checkpoint_every"], spec.settings["num_batches"]
        trainer.validate_with(held_out.rows, lambda version: version % every == 0 or version == last)

    def _tell_progress(self, detail: str) -> None:
        self._enter(WorkerPhase.LOADING, detail)

    def _load_trainer(self) -> PolicyTrainer:
        """At the spec's checkpoint, else at version 0. A worker that only serves needs it to make the weights again."""
        self._enter(WorkerPhase.LOADING, "building the trainer")
        trainer = self._new_trainer()
        if self.spec.checkpoint is not None:
            self._enter(WorkerPhase.LOADING, f"reading {Path(self.spec.checkpoint).name}")
            load_checkpoint(self.spec.checkpoint, trainer)
        return trainer


def _train(trainer: PolicyTrainer, batch: TrainBatch | None) -> StepReport:
    if isinstance(trainer, RowTrainer):
        return trainer.train_next()
    if batch is None:
        raise TrainingError("this job trains on samples; an order without a batch cannot be followed")
    return trainer.train(batch)


def peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _numbers(stats: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in stats.items() if isinstance(value, int | float)}
