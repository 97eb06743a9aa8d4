"""Tells the metrics of jobs to their experiment trackers, each by a process of its own.

Invariants:
* A job never waits for a tracker: this only reads the store. What a tracker could not take is told again when it answers.
* What goes wrong is one event per reason. Once a job is over, its trackers get `tracker_timeout` seconds for what is left; then its
  secrets are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from upweight.errors import StoreError
from upweight.server import integrations
from upweight.server.home import Home
from upweight.server.integrations import Integration
from upweight.server.settings import Settings
from upweight.server.store import jobs, versions
from upweight.server.store.database import Database
from upweight.server.tracker.protocol import Begin, Position, Row

ROWS_AT_ONCE = 200
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0  # seconds between tries
LONGEST_ANSWER = 1 << 16  # bytes

log = logging.getLogger(__name__)


class TrackerFailed(Exception):
    """A tracker that could not be told; `fatal`: another try would meet the same."""

    def __init__(self, reason: str, *, fatal: bool = False) -> None:
        self.fatal = fatal
        super().__init__(reason)


class Tracking:
    """The trackers of all jobs."""

    def __init__(self, database: Database, home: Home, settings: Settings) -> None:
        self._parts = (database, home, settings)
        self._home = home
        self._following: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}

    def start(self, unfinished: set[str]) -> None:
        """Finish what the jobs that are over have left, and remove their secrets."""
        for file in self._home.jobs.glob(f"*/{integrations.FILE}"):
            if (job_id := file.parent.name) not in unfinished:
                self.begin(job_id)
                self.end(job_id)

    def begin(self, job_id: str) -> None:
        """The job runs from now on."""
        found = integrations.kept(self._home.job_folder(job_id))
        if not found:
            return
        before = self._following.get(job_id)
        ending = asyncio.Event()
        task = asyncio.create_task(self._follow(job_id, found, ending, before), name=f"trackers of job {job_id}")
        self._following[job_id] = (task, ending)

    def end(self, job_id: str) -> None:
        """The job does not run any more: it is over, or waits."""
        if (following := self._following.get(job_id)) is not None:
            following[1].set()

    async def forget(self, job_id: str) -> None:
        """Of a job that came to its end without running."""
        if job_id not in self._following:
            await asyncio.to_thread(integrations.forget, self._home.job_folder(job_id))

    async def stop(self) -> None:
        tasks = [task for task, _ in self._following.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, job_id: str, found: list[Integration], ending: asyncio.Event, before: Any) -> None:
        if before is not None:
            await asyncio.wait({before[0]})
        database, home, _ = self._parts
        await asyncio.gather(*(Feed(job_id, one, ending, *self._parts).run() for one in found))
        await ending.wait()  # a tracker that is given up is so before
        if self._following.get(job_id, (None,))[0] is asyncio.current_task():
            del self._following[job_id]
            job = await database.read(lambda c: jobs.get_job(c, job_id))
            if job.is_over:
                await asyncio.to_thread(integrations.forget, home.job_folder(job_id))


class Feed:
    """One integration of a job, from where it runs until it does not."""

    def __init__(
        self,
        job_id: str,
        integration: Integration,
        ending: asyncio.Event,
        database: Database,
        home: Home,
        settings: Settings,
    ) -> None:
        self.job_id = job_id
        self.integration = integration
        self.ending = ending
        self.database, self.home, self.settings = database, home, settings

    async def run(self) -> None:
        """Never raises but when it is cancelled."""
        pause = FIRST_PAUSE
        while True:
            try:
                if await self._try(last=self.ending.is_set()):
                    return
            except (StoreError, OperationalError) as error:  # it comes back
                log.warning("job %s: %s waits for the store: %s", self.job_id, self._name, error)
                await asyncio.sleep(FIRST_PAUSE)
            except Exception:  # an error of ours costs the charts, not the job
                log.exception("job %s: %s is given up", self.job_id, self._name)
                return
            await self._paused(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _try(self, *, last: bool) -> bool:
        """Whether there is nothing more to do."""
        try:
            await self._tell_all()
            return True
        except TrackerFailed as failed:
            is_end = failed.fatal or last
            again = "" if is_end else "; it is told again later"
            await self._event(f"{self._name}: {failed}{again}", level="warn")
            return is_end

    @property
    def _name(self) -> str:
        return f"integration {self.integration.kind}"

    async def _tell_all(self) -> None:
        process = await _start(self.home, self.job_id)
        grace = 0.0
        try:
            await self._tell_to(process)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise TrackerFailed("its process ended") from error
        except asyncio.CancelledError:  # the server stops: what was handed over may be written yet
            grace = self.settings.worker_stop_timeout
            raise
        finally:
            await _end(process, grace)

    async def _tell_to(self, process: asyncio.subprocess.Process) -> None:
        job = await self.database.read(lambda c: jobs.get_job(c, self.job_id))
        begin: Begin = {
            "job_id": self.job_id,
            "kind": self.integration.kind,
            "shown": self.integration.shown,
            "secret": self.integration.secret,
            "folder": str(self.home.job_folder(self.job_id)),
            "settings": {"model": job.model, "method": job.method_type, **job.settings},
        }
        answer = await self._ask(process, begin)
        await self._event(f"{self._name}: metrics go to {answer['note']}")
        at: Position = answer["at"]
        while True:
            last = self.ending.is_set()
            for rows in _in_parts(await self.database.read(partial(_rows_after, job_id=self.job_id, at=at))):
                at = (await self._ask(process, {"rows": rows}))["at"]
            if last:
                break
            await self._paused(self.settings.worker_poll_interval)
        job = await self.database.read(lambda c: jobs.get_job(c, self.job_id))
        await self._ask(process, {"end": job.job_status if job.is_over else None})

    async def _ask(self, process: asyncio.subprocess.Process, content: Any) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self.settings.tracker_timeout):
                process.stdin.write(json.dumps(content).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise TrackerFailed(f"no answer within {self.settings.tracker_timeout:g} s") from None
        if not line:
            raise TrackerFailed("its process ended")
        answer = json.loads(line)
        if "failed" in answer:
            raise TrackerFailed(answer["failed"], fatal=answer["fatal"])
        return answer

    async def _paused(self, seconds: float) -> None:
        """For so long, or until the job does not run any more."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ending.wait(), seconds)

    async def _event(self, message: str, level: str = "info") -> None:
        text = integrations.without_secrets(message, self.integration)
        await self.database.write(partial(jobs.add_event_once, job_id=self.job_id, message=text, level=level))


def _rows_after(connection: Connection, job_id: str, at: Position) -> list[Row]:
    """In the order in which they were stored."""
    found: list[tuple[float, Row]] = []
    for row in versions.versions_since(connection, job_id, at["version"]):
        metrics = {**row.metrics, "update_skipped": float(row.update_skipped), "seconds": row.seconds}
        found.append(
            (row.created_at, {"step": row.version, "version": row.version, "client": None, "metrics": metrics})
        )
    for row in jobs.client_metrics_since(connection, job_id, at["client"]):
        told: Row = {"step": row.batch_index, "version": None, "client": row.seq, "metrics": row.metrics}
        found.append((row.created_at, told))
    return [row for _, row in sorted(found, key=lambda one: one[0])]


def _in_parts(rows: list[Row]) -> Iterator[list[Row]]:
    for start in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[start : start + ROWS_AT_ONCE]


async def _start(home: Home, job_id: str) -> asyncio.subprocess.Process:
    with (home.logs / f"{job_id}.trackers.log").open("ab") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "upweight.server.tracker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            limit=LONGEST_ANSWER,
            start_new_session=True,  # Ctrl-C in a terminal is for the server; and a tracker's own processes go with it
        )


async def _end(process: asyncio.subprocess.Process, grace: float) -> None:
    """The end of its input ends it; so does SIGKILL after `grace` seconds, with all that it started."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
