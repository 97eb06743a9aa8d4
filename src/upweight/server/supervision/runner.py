"""One running job: start its worker, bring it back to where it was, train filled batches in order, end.

Invariants:
* Version k+1 is announced only after batch k was trained, its fingerprint checked and its row stored: it can be made again from the
  newest checkpoint and the stored batches.
* After a restart nothing is served before the replayed fingerprints equal the recorded ones; `inference_version` never falls.
* A worker's death is an event and a restart; `max_restarts` deaths without a new version in between fail the job. A worker that
  cannot use model, settings or checkpoint fails it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy.exc import OperationalError

from upweight.errors import StoreError
from upweight.server.home import NO_ROOM, SHORT, Home
from upweight.server.refusals import Refusal
from upweight.server.settings import Settings
from upweight.server.store import completions, jobs, versions
from upweight.server.store.database import Database
from upweight.server.store.jobs import Job
from upweight.server.supervision import checkpoints
from upweight.server.supervision.gate import Gate
from upweight.server.supervision.memory import keeps_start, microbatch_tokens
from upweight.server.supervision.orders import Order, next_order
from upweight.server.supervision.origin import make_start_model
from upweight.server.supervision.specs import log_file, worker_spec
from upweight.server.supervision.worker_process import WorkerDied, WorkerProcess, WorkerRefused, start_worker
from upweight.server.worker_protocol import (
    CheckpointResult,
    ExportResult,
    TrainResult,
    WorkerMode,
    WorkerState,
)

STORE_PAUSE = 5.0  # seconds
DISK_FULL = os.strerror(errno.ENOSPC)

ODD_SAMPLES = {
    "filtered": "samples drawn with top-k, top-p, min-p, penalties or greedily are trained against log-probabilities of the whole vocabulary",
    "unmatched": "samples that match no completion of this server are trained with the log-probabilities they bring",
    "lone": "samples are the only ones of their task: nothing to compare them with, so they teach nothing",
    "masked": "samples without a token to train are left out: an empty mask, or an answer that the length limit cut",
    "stale": "samples are left out because the policy is too far from the one that drew them (correction masked)",
    "refused": "samples longer than the model's context or with ids outside its vocabulary are left out",
}

log = logging.getLogger(__name__)


class JobFailed(Exception):
    """The job cannot go on; `code` names the kind of failure for the answer's error object."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class JobRunner:
    """Runs job `job_id`. `run()` returns when the job is over; a worker that still serves is left in `gate`."""

    def __init__(self, job_id: str, database: Database, home: Home, settings: Settings) -> None:
        self.job_id = job_id
        self._facts = {"facts": {"job": job_id}}  # of its lines in the log
        self.database = database
        self.home = home
        self.settings = settings
        self.gate = Gate()
        self.batch_filled = asyncio.Event()
        self.worker: WorkerProcess | None = None
        self._deaths = 0
        self._skipped = 0

    async def run(self) -> None:
        """Live the job to its end. Cancelling this task stops the worker and leaves the job as it is."""
        while True:
            try:
                return await self._run_once()
            except (StoreError, OperationalError) as error:
                waits = "job %s: the store does not answer: %s; next try in %g s"
                log.error(waits, self.job_id, error, STORE_PAUSE, extra=self._facts)
            except OSError as error:  # one of NO_ROOM and SHORT
                log.error("job %s: %s; next try in %g s", self.job_id, error, STORE_PAUSE, extra=self._facts)
                await self._say(error)
            # A full disk or a lost volume is nobody's failure: what is stored stays valid, so start again from it.
            await self._stop_worker()
            await asyncio.sleep(STORE_PAUSE)
            if await self._ended_meanwhile():
                return None

    async def _ended_meanwhile(self) -> bool:
        """Whether its end was stored, and something behind that failed."""
        with contextlib.suppress(StoreError, OperationalError):
            return (await self._job()).is_over
        return False

    async def _say(self, error: OSError) -> None:
        what = "the server cannot write to its disk" if error.errno in NO_ROOM else "the machine is short of something"
        with contextlib.suppress(StoreError, OperationalError):  # the store may lie on the same disk
            await self._state("loading", f"{what} ({error.strerror}): make room; next try in {STORE_PAUSE:g} s")

    async def _run_once(self) -> None:
        try:
            await self._live()
        except JobFailed as failure:
            await self._fail(failure.code, str(failure))
        except asyncio.CancelledError:
            await self._stop_worker()
            raise
        except (StoreError, OperationalError):
            raise
        except OSError as error:
            if error.errno in NO_ROOM | SHORT:
                raise
            await self._fail_by_bug(error)
        except Exception as error:  # noqa: BLE001 - an error of ours fails its job, not the other jobs
            await self._fail_by_bug(error)

    async def _fail_by_bug(self, error: Exception) -> None:
        log.error("job %s: supervision failed", self.job_id, exc_info=error, extra=self._facts)
        await self._fail("internal_error", f"{type(error).__name__}: {error}")

    async def _live(self) -> None:
        while True:
            try:
                worker = await self._start()
                with _watching(worker, self.settings):
                    await self._catch_up(worker)
                    await self._train_to_the_end(worker)
                return
            except WorkerDied as death:
                await self._after_death(death)

    async def _after_death(self, death: WorkerDied) -> None:
        self.gate.shut()
        not_loaded = self.worker.why_not_loaded if self.worker is not None else None
        await self._stop_worker()
        if not_loaded is not None:
            raise JobFailed("not_loaded", not_loaded)
        self._deaths += 1
        if self._deaths > self.settings.max_restarts:
            raise JobFailed(
                "worker_died", f"the worker ended {self._deaths} times without a new version; last: {death}"
            )
        pause = self.settings.restart_backoff * 2 ** (self._deaths - 1)
        await self._event(
            f"{death}; restart {self._deaths} of {self.settings.max_restarts} in {pause:g} s", level="warn"
        )
        await self._state("loading", f"restarts its worker in {pause:g} s")
        await asyncio.sleep(pause)

    # Start and recovery

    async def _start(self) -> WorkerProcess:
        job = await self._job()
        checkpoint = await self.database.read(lambda c: checkpoints.newest_usable(c, self.job_id))
        folder = self.home.job_folder(self.job_id)
        folder.mkdir(exist_ok=True)
        await self._make_start_model(job)
        await self._state("loading", "starts its worker")
        if job.settings["microbatch_tokens"] is None:
            job = await self._fix_microbatch(job)
        spec = worker_spec(job, self.home, WorkerMode.TRAIN, checkpoint, self.settings)
        self.worker = await start_worker(
            self.settings.worker_command, spec, log_file(self.home, self.job_id), self.home.run
        )
        await self.worker.wait_until_ready(
            self.settings.worker_start_timeout, self.settings.worker_silence_timeout, self._report_loading()
        )
        return self.worker

    async def _make_start_model(self, job: Job) -> None:
        if "from_checkpoint" not in job.request:
            return
        await self._state("loading", "makes its start model of the checkpoint")
        try:
            await make_start_model(job, self.database, self.home, self.settings)
        except Refusal as refused:
            raise JobFailed("not_loaded", refused.text) from refused

    async def _fix_microbatch(self, job: Job) -> Job:
        """Chosen once and stored, so that a replay on another day sums its gradients in the same order."""
        free, lora = psutil.virtual_memory().available, job.settings["lora"] is not None
        start = keeps_start(job.method_type, job.settings)
        tokens = await asyncio.to_thread(microbatch_tokens, free, Path(job.model_path), lora=lora, keeps_start=start)
        fixed = {**job.settings, "microbatch_tokens": tokens}
        await self.database.write(lambda c: jobs.set_fields(c, self.job_id, settings=fixed))
        return await self._job()

    def _report_loading(self) -> Callable[[WorkerState], Awaitable[None]]:
        told = ""

        async def report(state: WorkerState) -> None:
            nonlocal told
            text = f"worker is {state.phase.value}" + (f": {state.detail}" if state.detail else "")
            if text != told:
                told = text
                await self._state("loading", text)

        return report

    async def _catch_up(self, worker: WorkerProcess) -> None:
        """Compare the loaded weights with the record, replay recorded batches, then announce and open the gate."""
        state = worker.state
        if state is None or state.version is None:
            raise JobFailed("wrong_answer", "the worker was ready without a version")
        job = await self._job()
        for note in state.notes:
            await self.database.write(partial(jobs.add_event_once, job_id=self.job_id, message=note, level="warn"))
        newest = await self.database.read(lambda c: versions.newest_version(c, self.job_id))
        if newest is None:
            await self._first_start(state)
            newest = 0
        await self._compare(state.version, state.fingerprint or "")
        for index in range(state.version, newest):
            await self._state("loading", f"replays batch {index} (to version {newest})")
            order = await next_order(self.database, job, index)
            result = await self._order_training(worker, order)
            await self._compare(result.version, result.fingerprint)
        if newest == 0:
            await self._event("model loaded: version 0 is served")
        else:
            await self._event(f"worker is at version {newest} again, with the recorded fingerprint")
        await self._announce(newest)
        self.gate.open(worker)

    async def _first_start(self, state: WorkerState) -> None:
        if state.version != 0:
            raise JobFailed(
                "wrong_version", f"a worker without checkpoint reports version {state.version} instead of 0"
            )
        fingerprint = state.fingerprint or ""
        await self.database.write(lambda c: versions.record_start(c, self.job_id, fingerprint))
        await self.database.write(lambda c: jobs.set_fields(c, self.job_id, started_at=time.time()))

    async def _compare(self, version: int, fingerprint: str) -> None:
        recorded = await self.database.read(lambda c: versions.get_version(c, self.job_id, version))
        if recorded is None or recorded.fingerprint != fingerprint:
            known = recorded.fingerprint if recorded else "not recorded"
            raise JobFailed(
                "fingerprint_mismatch",
                f"version {version} came back with fingerprint {fingerprint}, recorded: {known}; nothing was served from it",
            )

    # Training

    async def _train_to_the_end(self, worker: WorkerProcess) -> None:
        while True:
            job = await self._job()
            index = await self._version()
            ending = await self._why_it_ends(job, index)
            if ending is not None:
                return await self._finish(worker, index, ending)
            if job.filled_batches <= index:
                await self._wait_for_batch(worker, job)
                continue
            await self._train(worker, index)

    async def _wait_for_batch(self, worker: WorkerProcess, job: Job) -> None:
        self.batch_filled.clear()
        if (await self._job()).filled_batches > job.filled_batches:
            return
        await self._state("waiting_for_samples")
        woken = asyncio.ensure_future(self.batch_filled.wait())
        try:
            await asyncio.wait(
                {woken, worker.exit}, return_when=asyncio.FIRST_COMPLETED, timeout=await self._seconds_left()
            )
        finally:
            woken.cancel()
        if not worker.alive:
            raise worker.death()

    async def _train(self, worker: WorkerProcess, index: int) -> None:
        await self._state("training", f"trains batch {index}")
        order = await next_order(self.database, await self._job(), index)
        result = await self._order_training(worker, order)
        metrics = {**order.metrics, **result.metrics}
        await self.database.write(lambda c: versions.record_version(c, self.job_id, result, order.sample_seqs, metrics))
        self._deaths = 0
        await self._tell_odd_samples(order, result.fates)
        await self._maybe_checkpoint(worker, result.version)
        await self._announce(result.version, {"version": result.version, "fingerprint": result.fingerprint, **metrics})
        await self._judge_skip(result)
        await self._state("running")

    async def _tell_odd_samples(self, order: Order, fates: Sequence[str]) -> None:
        """One event per job for each kind of sample that is trained on less than it might be, or not at all."""
        odd = [kind for kind in ("filtered", "unmatched") if order.metrics.get(kind, 0) > 0]
        odd += ["lone"] if order.nothing_to_compare else []
        for kind in [*odd, *(fate for fate in ODD_SAMPLES if fate in fates)]:
            text = ODD_SAMPLES[kind]
            await self.database.write(partial(jobs.add_event_once, job_id=self.job_id, message=text, level="warn"))

    async def _order_training(self, worker: WorkerProcess, order: Order) -> TrainResult:
        index = order.index
        try:
            result: TrainResult = await worker.order(f"/train?batch_index={index}", TrainResult, content=order.body)
        except WorkerRefused as refused:
            await worker.kill(str(refused))
            raise worker.death() from refused
        if not result.fingerprint_ok:
            raise JobFailed("weights_mismatch", f"version {result.version}: the engine's weights are not the trainer's")
        if result.version != index + 1 or len(result.fates) != order.num_samples:
            raise JobFailed(
                "wrong_answer", f"batch {index} was answered with version {result.version}, {len(result.fates)} fates"
            )
        if unknown := sorted(set(result.fates) - set(versions.FATES)):
            raise JobFailed(
                "wrong_answer", f"batch {index}: unknown fates {unknown}; known: {', '.join(versions.FATES)}"
            )
        return result

    async def _judge_skip(self, result: TrainResult) -> None:
        self._skipped = self._skipped + 1 if result.update_skipped else 0
        if not result.update_skipped:
            return
        await self._event(f"version {result.version}: update skipped, loss or gradient was not finite", level="warn")
        if self._skipped >= self.settings.max_skipped_updates:
            raise JobFailed(
                "updates_skipped", f"{self._skipped} updates in a row were skipped: loss or gradient not finite"
            )

    async def _maybe_checkpoint(self, worker: WorkerProcess, version: int) -> None:
        job = await self._job()
        if version % job.settings["checkpoint_every"] == 0 or version == job.total_batches:
            try:
                await self._checkpoint(worker, job)
            except WorkerRefused as refused:
                # The version can still be made again from the older checkpoint and the stored batches.
                await self._event(f"checkpoint of version {version} failed: {refused}", level="warn")

    async def _checkpoint(self, worker: WorkerProcess, job: Job) -> None:
        result: CheckpointResult = await worker.order("/checkpoint", CheckpointResult)
        await self.database.write(lambda c: versions.set_checkpoint(c, self.job_id, result.version, result.path))
        await self._event(f"checkpoint of version {result.version}: {result.path}")
        keep = job.settings["keep_checkpoints"]
        folder = self.home.job_folder(self.job_id)
        await checkpoints.drop_old(self.database, self.job_id, keep, folder)

    # Ends

    async def _why_it_ends(self, job: Job, version: int) -> str | None:
        if job.total_batches is not None and version >= job.total_batches:
            return f"all {job.total_batches} batches are trained"
        budget = job.settings.get("budget") or {}
        if not any(budget.values()):
            return None
        spent = {
            "max_seconds": time.time() - (job.started_at or time.time()),
            "max_samples": await self.database.read(lambda c: versions.total(c, self.job_id, "samples")),
            "max_tokens": await self.database.read(lambda c: versions.total(c, self.job_id, "trained_tokens")),
        }
        for name, limit in budget.items():
            if limit is not None and spent[name] >= limit:
                return f"budget {name} = {limit:g} is used up ({spent[name]:g})"
        return None

    async def _seconds_left(self) -> float | None:
        job = await self._job()
        limit = (job.settings.get("budget") or {}).get("max_seconds")
        if limit is None:
            return None
        return max(0.0, (job.started_at or time.time()) + limit - time.time()) + 0.01

    async def _finish(self, worker: WorkerProcess, version: int, ending: str) -> None:
        job = await self._job()
        await self._state("running", "saves the trained model")
        weights = self.home.job_folder(self.job_id) / "weights"
        while True:
            try:
                await self._save(worker, job, version, weights)
                break
            except WorkerRefused as refused:
                if DISK_FULL not in str(refused):
                    raise JobFailed("not_saved", f"version {version} could not be saved: {refused}") from refused
                # Nobody's failure: all is trained, and room may be made.
                text = f"version {version} cannot be saved, the disk is full: free some space"
                await self._event(text, level="warn")
                await self._state("running", f"{text}; next try in {STORE_PAUSE:g} s")
                await asyncio.sleep(STORE_PAUSE)
        await self._event(f"{ending}; weights of version {version}: {weights}")
        await self.database.write(lambda c: jobs.succeed(c, self.job_id, ending, str(weights)))
        await self.database.write(lambda c: completions.forget(c, self.job_id))

    async def _save(self, worker: WorkerProcess, job: Job, version: int, weights: Path) -> None:
        recorded = await self.database.read(lambda c: versions.get_version(c, self.job_id, version))
        if recorded is None or recorded.checkpoint is None:
            await self._checkpoint(worker, job)
        for half in weights.parent.glob(f".{weights.name}.*"):  # of a worker that was killed
            await asyncio.to_thread(shutil.rmtree, half, ignore_errors=True)
        await worker.order("/export", ExportResult, json={"path": str(weights)})

    async def _fail(self, code: str, message: str) -> None:
        self.gate.close(Refusal(409, f"job {self.job_id} failed: {message}"))
        log.info("job %s: failed: %s", self.job_id, message, extra=self._facts)
        await self.database.write(lambda c: jobs.fail(c, self.job_id, code, message))
        await self._stop_worker()

    async def _stop_worker(self) -> None:
        self.gate.shut()
        if self.worker is not None:
            worker, self.worker = self.worker, None
            await worker.stop(self.settings.worker_stop_timeout)

    # Small things

    async def _job(self) -> Job:
        return await self.database.read(lambda c: jobs.get_job(c, self.job_id))

    async def _version(self) -> int:
        version = await self.database.read(lambda c: versions.newest_version(c, self.job_id))
        return version or 0

    async def _announce(self, version: int, data: dict[str, Any] | None = None) -> None:
        await self.database.write(lambda c: jobs.announce_version(c, self.job_id, version))
        if data is not None:
            await self._event(f"version {version} is served", type="metrics", data=data)

    async def _state(self, job_status: str, reason: str = "") -> None:
        await self.database.write(lambda c: jobs.set_state(c, self.job_id, job_status, reason))

    async def _event(self, message: str, **more: Any) -> None:
        log.info("job %s: %s", self.job_id, message, extra=self._facts)
        await self.database.write(lambda c: jobs.add_event(c, self.job_id, message, **more))


@contextlib.contextmanager
def _watching(worker: WorkerProcess, settings: Settings) -> Any:
    task = asyncio.ensure_future(worker.watch(settings.worker_poll_interval, settings.worker_silence_timeout))
    try:
        yield
    finally:
        task.cancel()
