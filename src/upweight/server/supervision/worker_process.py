"""One worker process: started, talked to over its Unix socket, watched, stopped.

Invariants:
* The worker's standard input is a pipe whose other end only this process holds: when this process dies, the worker reads end of file.
* A call never outlives the worker: if the process ends, the caller gets `WorkerDied` with exit code and the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from pydantic import BaseModel, ValidationError

from upweight.errors import WorkerError
from upweight.server.home import write_atomically
from upweight.server.worker_protocol import LOAD_FAILED, WorkerPhase, WorkerSpec, WorkerState

log = logging.getLogger(__name__)

OnState = Callable[[WorkerState], Awaitable[None]]

READY_PHASES = frozenset({WorkerPhase.READY, WorkerPhase.TRAINING, WorkerPhase.SAVING})
LOG_TAIL_LINES = 15
LONGEST_SOCKET_PATH = 107  # bytes
DEATH_GRACE = 5.0  # seconds between a broken connection and the exit that explains it


class WorkerDied(WorkerError):
    """The process ended, or was killed because it did not answer."""


class WorkerRefused(WorkerError):
    """The worker answered an order with an error status."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class WorkerProcess:
    """A running worker. Make one with `start_worker`."""

    def __init__(
        self, spec: WorkerSpec, process: asyncio.subprocess.Process, log: Path, log_start: int, folder: Path
    ) -> None:
        self.spec = spec
        self.log = log
        self.state: WorkerState | None = None
        self.tokens_per_second = 0.0
        self.last_used = time.monotonic()
        self._taken_at = 0.0
        self._process = process
        self._folder = folder
        self._log_start = log_start
        self._killed_because = ""
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=spec.socket, limits=httpx.Limits(max_connections=None)),
            base_url="http://worker",
            timeout=httpx.Timeout(None, connect=10.0),
        )
        self.exit = asyncio.ensure_future(process.wait())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self.exit.done()

    @property
    def why_not_loaded(self) -> str | None:
        """Its own words if it ended because model, settings or checkpoint cannot be used; else None."""
        if self._process.returncode != LOAD_FAILED:
            return None
        lines = self.log_tail().splitlines() or ["it says nothing"]
        return lines[-1].removeprefix("error: ")

    def memory_bytes(self) -> int:
        """Resident memory of the process; 0 if it is gone."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def death(self) -> WorkerDied:
        """What to raise once the process has ended."""
        return WorkerDied(self.describe_death())

    def describe_death(self) -> str:
        code = self._process.returncode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        why = f" ({self._killed_because})" if self._killed_because else ""
        tail = self.log_tail()
        return f"worker process ended with {how}{why}" + (f"; end of its log: {tail}" if tail else "")

    def log_tail(self) -> str:
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(self._log_start, size - 8000))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])

    async def order(self, path: str, answer: type[BaseModel], **request: Any) -> Any:
        """POST an order and validate its answer. Raises WorkerDied, or WorkerRefused for an error status."""
        response = await self._send("POST", path, **request)
        if response.status_code >= 400:
            raise WorkerRefused(
                response.status_code, f"worker answered {path} with {response.status_code}: {response.text[:500]}"
            )
        return answer.model_validate_json(response.content)

    async def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        call = asyncio.ensure_future(self.client.request(method, path, **request))
        try:
            await asyncio.wait({call, self.exit}, return_when=asyncio.FIRST_COMPLETED)
            if call.done() and not isinstance(call.exception(), httpx.TransportError):
                return call.result()
            await self._await_exit(call)
            raise self.death()
        finally:
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                await call

    async def _await_exit(self, call: asyncio.Future[httpx.Response]) -> None:
        """After a broken connection: the process is expected to end; one that lives on without answering is killed."""
        done, _ = await asyncio.wait({self.exit}, timeout=DEATH_GRACE)
        if not done:
            problem = call.exception() if call.done() else None
            await self.kill(f"it broke the connection: {problem!r}")

    async def wait_until_ready(self, timeout: float, silence: float, on_state: OnState | None = None) -> WorkerState:
        """Poll until the worker can serve. `on_state(WorkerState)` is awaited for each look.

        Raises WorkerDied if it ends, says nothing for `silence` seconds, or is not ready after `timeout`.
        """
        started = heard = time.monotonic()
        while True:
            state = await self._look(silence)
            if state is not None:
                heard = time.monotonic()
                if on_state is not None:
                    await on_state(state)
                if state.version is not None and state.phase in READY_PHASES:
                    return state
            now = time.monotonic()
            if now - heard > silence or now - started > timeout:
                await self.kill(f"not ready after {now - started:.0f} s")
            await asyncio.wait({self.exit}, timeout=0.05 if now - started < 5 else 0.5)

    async def _look(self, patience: float) -> WorkerState | None:
        """State, or None while the worker does not answer (yet)."""
        if not self.alive:
            raise self.death()
        try:
            response = await self.client.get("/state", timeout=min(10.0, patience))
        except httpx.TransportError:
            return None
        if response.status_code != 200:
            return None
        try:
            self._take(WorkerState.model_validate_json(response.content))
        except ValidationError:
            log.warning("worker %d: its state cannot be read: %s", self.pid, response.text[:200])
            return None
        return self.state

    def _take(self, state: WorkerState) -> None:
        """Keep a state, and from its token counter the rate since the look before."""
        now, tokens = time.monotonic(), state.stats.get("total_tokens", 0.0)
        if self.state is not None and now > self._taken_at:
            self.tokens_per_second = max(0.0, tokens - self.state.stats.get("total_tokens", 0.0)) / (
                now - self._taken_at
            )
        self.state, self._taken_at = state, now

    async def watch(self, interval: float, silence: float) -> None:
        """Refresh `state` until the process ends; a worker that answers nothing for `silence` seconds is killed."""
        heard = time.monotonic()
        while self.alive:
            with contextlib.suppress(WorkerDied):
                if await self._look(silence) is not None:
                    heard = time.monotonic()
            if self.alive and time.monotonic() - heard > silence:
                await self.kill(f"no answer for {silence:.0f} s")
            await asyncio.wait({self.exit}, timeout=interval)

    async def kill(self, because: str) -> None:
        self._killed_because = because
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.wait({self.exit})

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds. Idempotent."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            if self._process.stdin is not None:
                self._process.stdin.close()
            done, _ = await asyncio.wait({self.exit}, timeout=grace)
            if not done:
                await self.kill(f"it did not stop within {grace:g} s")
        await self.client.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)


async def start_worker(command: Sequence[str], spec: WorkerSpec, log: Path, run_folder: Path) -> WorkerProcess:
    """Start a worker for `spec`, whose `socket` is set here: below `run_folder` if the path is short enough for a socket."""
    where = str(run_folder) if len(os.fsencode(run_folder)) <= LONGEST_SOCKET_PATH - 20 else None
    folder = Path(tempfile.mkdtemp(prefix="uw-", dir=where))
    spec = spec.model_copy(update={"socket": str(folder / "s")})
    spec_file = folder / "spec.json"
    write_atomically(spec_file, spec.model_dump_json(indent=1), mode=0o600)
    with log.open("ab") as output:
        log_start = output.tell()
        process = await asyncio.create_subprocess_exec(
            *command,
            str(spec_file),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in a terminal is for the server, which stops its workers in order
        )
    return WorkerProcess(spec, process, log, log_start, folder)
