"""All jobs of this server: which run, which wait for a place, which only serve.

Invariants:
* At most `max_running` worker processes exist, and a second one only where its job's estimate of memory fits. A job that trains keeps
  its place; a worker that only serves gives it up as soon as a queued job needs it, and is started again when it is asked.
* Jobs get their places in the order of the queue: none overtakes another because it is small.
* On start every job that is not over is queued again, oldest first, but for the paused ones.
* A paused job holds no place and takes samples; resumed, it goes on from its last checkpoint and replays what was trained since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

import psutil
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from upweight.errors import StoreError
from upweight.server.home import Home
from upweight.server.refusals import Refusal
from upweight.server.settings import Settings
from upweight.server.store import completions, jobs, versions
from upweight.server.store.database import Database
from upweight.server.store.jobs import Job
from upweight.server.store.models import PROMOTED
from upweight.server.supervision import checkpoints
from upweight.server.supervision.gate import Gate
from upweight.server.supervision.memory import job_bytes, shortage
from upweight.server.supervision.runner import JobRunner
from upweight.server.supervision.specs import log_file, worker_spec
from upweight.server.supervision.tracking import Tracking
from upweight.server.supervision.worker_process import WorkerDied, WorkerProcess, start_worker
from upweight.server.worker_protocol import WorkerMode

PLACES_PAUSE = 30.0  # seconds between looks for memory that others have freed

log = logging.getLogger(__name__)


class Supervisor:
    """Lives in the event loop of the API process."""

    def __init__(self, database: Database, home: Home, settings: Settings) -> None:
        self.database = database
        self.home = home
        self.settings = settings
        self.tracking = Tracking(database, home, settings)
        self._queue: list[str] = []
        self._gates: dict[str, Gate] = {}
        self._runners: dict[str, JobRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._idle: dict[str, WorkerProcess] = {}  # jobs that are over and still served
        self._loading: dict[str, asyncio.Task[None]] = {}  # workers being started to serve a job that is over
        self._chores: set[asyncio.Task[None]] = set()
        self._needs: dict[str, int] = {}  # bytes of memory of a job that runs or is next, by estimate
        self._places = asyncio.Lock()
        self._turns: dict[str, asyncio.Lock] = {}  # one order of a person to a job at a time
        self._stopping = False

    async def start(self) -> None:
        """Queue what was not over when the server stopped."""
        unfinished = await self.database.read(jobs.unfinished_jobs)
        self.tracking.start({job.id for job in unfinished})
        for job in unfinished:
            if job.job_status == "paused":
                continue
            if job.job_status != "queued":
                await self.database.write(partial(_resume, job_id=job.id))
            self._queue.append(job.id)
        self._fill_places_soon()

    async def stop(self) -> None:
        """Stop all workers; the jobs stay as they are and are resumed by the next start."""
        self._stopping = True
        self._queue.clear()
        tasks = [*self._tasks.values(), *self._chores, *self._loading.values()]
        for task in tasks:
            task.cancel()
        idle = [worker.stop(self.settings.worker_stop_timeout) for worker in self._idle.values()]
        await asyncio.gather(*tasks, *idle, self.tracking.stop(), return_exceptions=True)

    def submit(self, job_id: str) -> None:
        self._queue.append(job_id)
        self._fill_places_soon()

    def batch_filled(self, job_id: str) -> None:
        if (runner := self._runners.get(job_id)) is not None:
            runner.batch_filled.set()

    async def cancel(self, job_id: str) -> None:
        """Bring a job to its end as cancelled; does nothing if it is over."""
        async with self._turn(job_id):
            await self._cancel(job_id)
        self._fill_places_soon()

    async def _cancel(self, job_id: str) -> None:
        if not await self.database.write(lambda c: jobs.cancel(c, job_id)):
            return
        self.gate(job_id).close(Refusal(409, f"job {job_id} is cancelled"))
        await self._take_out(job_id)
        await self.tracking.forget(job_id)
        await self.database.write(lambda c: completions.forget(c, job_id))

    async def pause(self, job_id: str) -> None:
        """Stop the job's worker and give up its place. Does nothing if it is paused; raises Refusal 409 if it is over.

        A pause that cannot be stored is none: the job goes on.
        """
        async with self._turn(job_id):
            was_on = await self._take_out(job_id)
            try:
                await self.database.write(lambda c: jobs.pause(c, job_id))
            except (StoreError, OperationalError):
                if was_on and not (await self.database.read(lambda c: jobs.get_job(c, job_id))).is_over:
                    self.submit(job_id)
                raise
        self._fill_places_soon()

    async def resume(self, job_id: str) -> None:
        """Queue a paused job again. Does nothing if it is not paused; raises Refusal 409 if it is over."""
        async with self._turn(job_id):
            if await self.database.write(lambda c: jobs.resume(c, job_id)):
                self.submit(job_id)

    def _turn(self, job_id: str) -> asyncio.Lock:
        return self._turns.setdefault(job_id, asyncio.Lock())

    async def _take_out(self, job_id: str) -> bool:
        """Out of the queue, or its worker stopped. Whether it was queued or ran."""
        waited = job_id in self._queue
        if waited:
            self._queue.remove(job_id)
        if (task := self._tasks.get(job_id)) is None:
            return waited
        task.cancel()
        await asyncio.wait({task})
        return True

    def gate(self, job_id: str) -> Gate:
        return self._gates.setdefault(job_id, Gate())

    def worker_of(self, job_id: str) -> WorkerProcess | None:
        """The job's worker process, ready or not."""
        runner = self._runners.get(job_id)
        return runner.worker if runner is not None else self._idle.get(job_id)

    def serves(self, job_id: str) -> bool:
        """Whether the job's model can be asked now."""
        worker = self.gate(job_id).worker
        return worker is not None and worker.alive

    async def serving(self, job: Job) -> WorkerProcess:
        """A worker that may answer the job's inference requests now. Waits for it; raises Refusal 409 or 503."""
        if job.job_status in ("failed", "cancelled"):
            raise Refusal(409, f"job {job.id} is {job.job_status}: {job.reason}")
        if job.job_status == "succeeded" and job.id not in self._runners:
            await self._serve_again(job)
        worker = await self.gate(job.id).wait(self.settings.inference_wait, f"job is {job.job_status}: {job.reason}")
        worker.last_used = time.monotonic()
        return worker

    # Places

    def _fill_places_soon(self) -> None:
        if self._stopping:
            return
        # In a task of its own: the lock may be held while a serving worker loads.
        task = asyncio.create_task(self._fill_places())
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    def _fill_places_later(self) -> None:
        asyncio.get_running_loop().call_later(PLACES_PAUSE, self._fill_places_soon)

    async def _fill_places(self) -> None:
        async with self._places:
            try:
                while self._queue and not self._stopping:
                    if not await self._begin_next(self._queue[0]):
                        return
            except (StoreError, OperationalError, OSError) as error:
                log.warning("places are not filled: %s; next try in %g s", error, PLACES_PAUSE)
                self._fill_places_later()

    async def _begin_next(self, job_id: str) -> bool:
        """Whether there was a place for the job."""
        if (lack := await self._lack_of_memory(job_id)) or not await self._make_place():
            await self._tell_the_waiting(lack)
            return False
        if job_id in self._queue:  # it may have been taken out while a place was made
            self._queue.remove(job_id)
            self._begin(job_id)
        return True

    async def _lack_of_memory(self, job_id: str) -> str | None:
        """Why the job has to wait for memory. Where serving workers are what is in the way, they are stopped."""
        job = await self.database.read(lambda c: jobs.get_job(c, job_id))
        needed = self._needs[job_id] = await asyncio.to_thread(job_bytes, job)
        if (lack := self._shortage(needed, serving=[])) is not None:
            return lack
        while self._idle and self._shortage(needed, serving=list(self._idle)):
            await self._retire(self._least_used())
        return None

    def _shortage(self, needed: int, *, serving: list[str]) -> str | None:
        """`serving`: the serving workers that would stay."""
        limit = self.settings.memory_gb
        running = [
            (self._needs.get(job_id, 0), runner.worker.memory_bytes() if runner.worker is not None else 0)
            for job_id, runner in self._runners.items()
        ]
        held = {job_id: worker.memory_bytes() for job_id, worker in self._idle.items()}
        freed = sum(size for job_id, size in held.items() if job_id not in serving)
        return shortage(
            needed,
            [*running, *((held[job_id], held[job_id]) for job_id in serving)],
            free=psutil.virtual_memory().available + freed,
            limit=None if limit is None else int(limit * 1e9),
        )

    async def _make_place(self) -> bool:
        """Whether a worker may be started; stops the serving worker that was used longest ago if it must."""
        for job_id in [job_id for job_id, worker in self._idle.items() if not worker.alive]:
            await self._retire(job_id)
        if len(self._runners) + len(self._idle) < self.settings.max_running:
            return True
        if not self._idle:
            return False
        await self._retire(self._least_used())
        return True

    def _least_used(self) -> str:
        return min(self._idle, key=lambda job_id: self._idle[job_id].last_used)

    async def stop_serving(self, job_id: str) -> None:
        """Of a model that is not there any more."""
        async with self._places:
            if job_id in self._idle:
                await self._retire(job_id)
        self._fill_places_soon()

    async def _retire(self, job_id: str) -> None:
        self.gate(job_id).shut()
        await self._idle.pop(job_id).stop(self.settings.worker_stop_timeout)

    async def _retire_if_large(self, job_id: str) -> None:
        """A trainer's worker may hold far more memory than serving needs; a new one is started when it is asked."""
        limit, worker = self.settings.idle_memory_gb, self._idle.get(job_id)
        if limit is None or worker is None or (held := worker.memory_bytes()) <= limit * 1e9:
            return
        async with self._places:
            if job_id in self._idle:
                await self._retire(job_id)
        text = (
            f"worker stopped: it held {held / 1e9:.2f} GB, idle_memory_gb = {limit:g}; it is started again when asked"
        )
        await self.database.write(partial(jobs.add_event, job_id=job_id, message=text))

    async def _tell_the_waiting(self, lack: str | None) -> None:
        """`lack`: why the first of them waits, if not for a place. Others may free memory, so it is tried again."""
        if lack is not None:
            self._fill_places_later()
        running = ", ".join(self._runners)
        for index, job_id in enumerate(self._queue):
            reason = f"{lack if lack and index == 0 else 'waits for a place'}; running: {running}"
            waits = partial(jobs.set_state, job_id=job_id, job_status="queued", reason=reason)
            try:
                await self.database.write(waits)
            except (StoreError, OperationalError) as error:
                log.warning("job %s: that it waits for a place cannot be stored: %s", job_id, error)

    def _begin(self, job_id: str) -> None:
        runner = JobRunner(job_id, self.database, self.home, self.settings)
        runner.gate = self.gate(job_id)
        self._runners[job_id] = runner
        self.tracking.begin(job_id)
        task = asyncio.create_task(self._accompany(runner), name=f"job {job_id}")
        task.add_done_callback(_log_failure)
        self._tasks[job_id] = task

    async def _accompany(self, runner: JobRunner) -> None:
        try:
            await runner.run()
        finally:
            self._runners.pop(runner.job_id, None)
            self._needs.pop(runner.job_id, None)
            self._tasks.pop(runner.job_id, None)
            self.tracking.end(runner.job_id)
            if runner.worker is not None and not self._stopping:
                self._idle[runner.job_id] = runner.worker
            self._fill_places_soon()  # however it ended: its place is free
        await self._retire_if_large(runner.job_id)

    async def _serve_again(self, job: Job) -> None:
        """Start a worker that only serves, unless one does. The request that asked may go away: others wait for it too."""
        task = self._loading.get(job.id)
        if task is None:
            task = self._loading[job.id] = asyncio.create_task(self._load(job), name=f"serving job {job.id}")
            task.add_done_callback(lambda _: self._loading.pop(job.id, None))
            task.add_done_callback(_log_failure)
        await asyncio.shield(task)

    async def _load(self, job: Job) -> None:
        async with self._places:
            present = self._idle.get(job.id)
            if present is not None and present.alive:
                return
            if not await self._make_place():
                running = ", ".join(self._runners)
                raise Refusal(503, f"the model of job {job.id} is not loaded and all places are taken by {running}")
            checkpoint = await self.database.read(lambda c: checkpoints.newest_usable(c, job.id))
            if checkpoint is None and job.method_type != PROMOTED:  # the start model must not pass for the trained one
                raise Refusal(
                    409, f"the checkpoints of job {job.id} are no longer on the disk; its model cannot be served"
                )
            self.home.job_folder(job.id).mkdir(exist_ok=True)  # a promoted model has none yet
            spec = worker_spec(job, self.home, WorkerMode.SERVE, checkpoint, self.settings)
            worker = await start_worker(self.settings.worker_command, spec, log_file(self.home, job.id), self.home.run)
            self._idle[job.id] = worker
            try:
                await self._check(job, worker)
            except BaseException:  # no worker is left behind, also when the request is cancelled
                await self._retire(job.id)
                raise
            self.gate(job.id).open(worker)

    async def _check(self, job: Job, worker: WorkerProcess) -> None:
        try:
            state = await worker.wait_until_ready(
                self.settings.worker_start_timeout, self.settings.worker_silence_timeout
            )
        except WorkerDied as death:
            raise Refusal(
                503, f"the model of job {job.id} could not be loaded: {worker.why_not_loaded or death}"
            ) from death
        version = state.version or 0
        if await self._recorded(job, version) != state.fingerprint:
            raise Refusal(
                503, f"the model of job {job.id} loaded as version {version} with a fingerprint that is not recorded"
            )

    async def _recorded(self, job: Job, version: int) -> str | None:
        """The fingerprint that the weights must have."""
        if job.method_type == PROMOTED:
            return str(job.request["fingerprint"])
        row = await self.database.read(lambda c: versions.get_version(c, job.id, version))
        return None if row is None else str(row.fingerprint)


def _resume(connection: Connection, job_id: str) -> None:
    jobs.set_state(connection, job_id, "queued", "waits for a place after a start of the server")
    jobs.add_event(connection, job_id, "server started again: the job is resumed")


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s: its supervision ended: %r", task.get_name(), error)
