"""The main job as one call: a real server, a real job, real rollouts; held-out score before and after.

    calibrate → start server → create job → score → roll out, upload, train → score → report

Every step leaves what a resumption needs in the run's record, so that an interrupted run can be finished with exactly the
planned number of batches.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from upweight.api_client import TokenFactory
from upweight.demo.display import Display
from upweight.demo.evaluation import Evaluation, evaluate
from upweight.demo.monitor import Monitor
from upweight.demo.plan import QUICK_EVAL_TASKS, DemoPlan
from upweight.demo.record import DemoOptions, RunRecord, load_record
from upweight.demo.report import Report, make_report
from upweight.demo.rollout import roll_out_sum
from upweight.demo.server_process import ServerProcess
from upweight.demo.sums import SumDataset, SumTask, split_tasks
from upweight.errors import ConfigError, ServerError, StoreError, UpweightError
from upweight.rollout import RolloutConfig, RolloutContext, RolloutRunner
from upweight.server.home import Home
from upweight.weights.source import resolve

log = logging.getLogger(__name__)

POLL = 0.2
OVER = ("succeeded", "failed", "cancelled")


class DemoRun:
    """One run of the demo, new or resumed. `display` shows notes, `monitor` the numbers."""

    def __init__(self, home: Path, record: RunRecord, monitor: Monitor, display: Display) -> None:
        self.home = home
        self.record = record
        self.plan = DemoPlan(record.options)
        self.monitor = monitor
        self.display = display
        self._earlier_cpu = record.cpu_seconds
        self._writing = threading.Lock()
        monitor.on_tick = self.count_costs
        split = split_tasks(record.options.seed)
        self.train_tasks = split.train
        self.eval_tasks: list[SumTask] = split.held_out[:QUICK_EVAL_TASKS] if record.options.quick else split.held_out

    def go(self) -> Report:
        """Runs to the end and reports; `KeyboardInterrupt` when the user stops it."""
        if self.record.batches is None:
            self._plan_batches()
        self.monitor.phase("starting the server")
        with ServerProcess(self.home) as server, TokenFactory(server.url, server.key) as client:
            try:
                return self._go_with(server, client)
            except UpweightError:
                raise
            except Exception as error:  # whatever it looks like from here, a server that ended is the cause
                if (why := server.ended()) is not None:
                    raise ServerError(f"the server ended: {why}") from error
                raise

    def _go_with(self, server: ServerProcess, client: TokenFactory) -> Report:
        batches = self.record.batches
        assert batches is not None
        job_id = self._find_or_create_job(client, batches)
        self.monitor.watch_job(server.url, server.key, job_id, batches)
        self.display.note(f"watch it in a browser: {server.url}/ (the key lies in {self.home / 'api_key'})")
        self._await_version(0, "loading the model")
        context = RolloutContext(self._rollout_config(job_id, batches), client)
        if self.record.before is None:
            before = self._evaluate(context, "scoring before training")
            _post_score(client, job_id, 0, before)
            self._remember(before=asdict(before))
        before = Evaluation(**(self.record.before or {}))
        self.display.note(f"held-out score before: {before.score:.3f} ({len(before.right)} sums never trained on)")
        self._train(client, context.config, batches)
        after = self._evaluate(context, "scoring after training")
        _post_score(client, job_id, batches, after)
        self._await_end()
        report = make_report(self.record, self.plan, self.eval_tasks, before, after, self.monitor)
        self._remember(finished=True)
        return report

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _plan_batches(self) -> None:
        fixed = self.plan.fixed_batches()
        if fixed is None:
            self.monitor.phase("measuring this machine", "one batch, thrown away")
            speed = self._calibrate()
            fixed = self.plan.fitting_batches(
                speed["step_seconds"], speed["token_seconds"], self.monitor.seconds, len(self.eval_tasks)
            )
            self.display.note(f"a batch takes about {speed['step_seconds']:.1f} s here: {fixed} batches planned")
        self._remember(batches=fixed)

    def _calibrate(self) -> dict[str, float]:
        cache = self.home / "cache" / "compiled"
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"options": asdict(self.record.options), "cache": str(cache)}, file)
            file.flush()
            command = [sys.executable, "-m", "upweight.demo.calibrate", file.name]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
            try:
                output, errors = process.communicate()
            except BaseException:  # Ctrl-C above all: the measurement must not outlive this process
                process.kill()
                process.wait()
                raise
        if process.returncode != 0:
            last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise ServerError(f"the calibration step failed: {last}")
        return json.loads(output.strip().splitlines()[-1])

    def _find_or_create_job(self, client: TokenFactory, batches: int) -> str:
        jobs = client.v1.fine_tuning.jobs
        suffix = f"demo-{self.record.run_id}"
        if self.record.job_id is not None:
            return self.record.job_id
        for job in jobs.list(limit=100).data:
            told = job.suffix.root if job.suffix is not None else ""
            if told == suffix:
                self._remember(job_id=job.id)
                return job.id
            if str(told).startswith("demo-") and _status(job) in ("queued", "running", "validating_files"):
                jobs.cancel(job_id=job.id)
                self.display.note(f"cancelled the unfinished demo job {job.id}")
        self.monitor.phase("creating the job")
        job = jobs.create(
            model=self.record.options.model, training_file="", method=self.plan.method(batches), suffix=suffix
        )
        self._remember(job_id=job.id)
        return job.id

    def _rollout_config(self, job_id: str, batches: int) -> RolloutConfig:
        return RolloutConfig(
            job_id=job_id,
            model_name=self.record.options.model,
            batch_size=self.plan.batch_size,
            num_samples_per_task=self.plan.group_size,
            num_batches=batches,
            max_concurrency=self.plan.batch_size,
            allowed_staleness=-1,  # strictly on-policy: every batch is sampled from the newest version
            num_rollout_retries=2,
            status_polling_interval=0.1,
            no_progress_timeout=600.0,
        )

    def _train(self, client: TokenFactory, config: RolloutConfig, batches: int) -> None:
        filled = int(self.monitor.job.get("filled_batches") or 0)
        dataset = SumDataset(self.train_tasks, self.record.options.seed, start=filled * self.plan.groups)
        runner = RolloutRunner(
            api_client=client,
            config=config,
            rollout_fn=partial(roll_out_sum, settings=self.plan.rollout),
            dataset=dataset,
            progress="none",
        )
        self.monitor.phase("training")
        self.monitor.watch_runner(runner, evaluation_seconds=10.0)
        summary = runner.run()
        if summary.reason.startswith("stop") or "SIG" in summary.reason:
            raise KeyboardInterrupt
        log.info("rollouts ended: %s", summary)
        self._await_version(batches, "training on the last batch")

    def _evaluate(self, context: RolloutContext, phase: str) -> Evaluation:
        def show(done: int) -> None:
            self.monitor.phase(phase, f"{done} of {len(self.eval_tasks)} answers")

        show(0)
        return evaluate(context.openai_client, context.config.model_name, self.eval_tasks, on_answer=show)

    def _await_version(self, version: int, phase: str) -> None:
        """Until the job serves `version`; a job that ended without it is an error."""
        while True:
            self.monitor.phase(phase)
            self.monitor.refresh()
            job = self.monitor.job
            served = job.get("inference_version")
            if served is not None and served >= version:
                return
            if job.get("job_status") in OVER:
                raise ServerError(f"job {self.record.job_id} {job['job_status']}: {job.get('reason')}")
            time.sleep(POLL)

    def _await_end(self) -> None:
        """Until the last checkpoint and the weights are on disk."""
        while self.monitor.job.get("job_status") not in OVER:
            self.monitor.phase("saving the weights")
            time.sleep(POLL)
            self.monitor.refresh()
        if self.monitor.job["job_status"] != "succeeded":
            job = self.monitor.job
            raise ServerError(f"job {self.record.job_id} {job['job_status']}: {job.get('reason')}")

    def _remember(self, **changes: Any) -> None:
        with self._writing:
            for name, value in changes.items():
                setattr(self.record, name, value)
            self.record.save(self.home)

    def count_costs(self) -> None:
        """Keeps what the run took so far, so that a killed part counts too."""
        self._remember(
            seconds=self.monitor.seconds,
            cpu_seconds=self._earlier_cpu + self.monitor.cpu_seconds,
            peak_memory_bytes=max(self.record.peak_memory_bytes, self.monitor.peak_memory_bytes),
        )


def start_record(home: Path, options: DemoOptions, *, resume: bool) -> RunRecord:
    """The record of a new run, or of the one to finish. `ConfigError` when there is nothing to finish."""
    last = load_record(home)
    if resume:
        if last is None:
            raise ConfigError(f"there is no run to resume in {home}; start one without --resume")
        if last.finished:
            raise ConfigError("the last run is complete; start a new one without --resume")
        return last
    resolve(options.model)  # a model that is not here is told before anything starts
    record = RunRecord(options=options, run_id=secrets.token_hex(4))
    record.save(home)
    return record


def prepare_home(home: Path) -> None:
    """Raises `ServerError` when the folder cannot be written."""
    try:
        (home / "logs").mkdir(parents=True, exist_ok=True)
        probe = home / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ServerError(f"home folder {home} is not writable ({error.strerror}); set UPWEIGHT_HOME") from error


@contextmanager
def alone_in(home: Path, *, patience: float = 0.0) -> Iterator[None]:
    """Holds the home for this demo, before anything of an earlier run is touched.

    `StoreError` when somebody else uses it, after `patience` seconds in which the server of a killed demo may end.
    """
    with (home / "demo.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(f"another demo runs in {home}; wait for it, or set UPWEIGHT_HOME") from error
        _await_no_server(Home(home), time.monotonic() + patience)
        yield


def _await_no_server(home: Home, end: float) -> None:
    while True:
        try:
            home.lock()
        except StoreError:
            if time.monotonic() >= end:
                raise
            time.sleep(POLL)
        else:
            return home.unlock()


def _post_score(client: TokenFactory, job_id: str, batch_index: int, evaluation: Evaluation) -> None:
    metrics = {"held_out_score": evaluation.score}
    client.v1alpha1.fine_tuning.jobs.post_metrics(job_id=job_id, batch_index=batch_index, metrics=metrics)


def _status(job: Any) -> str:
    return str(getattr(job.status, "value", job.status))
