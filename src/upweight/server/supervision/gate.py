"""Where a job's inference requests wait until a worker may serve them.

Invariant: a worker stands behind an open gate only while its weights are those of a recorded version.
"""

from __future__ import annotations

import asyncio
import contextlib

from upweight.server.refusals import Refusal
from upweight.server.supervision.worker_process import WorkerProcess


class Gate:
    """Open with a worker, shut (requests wait), or closed for good with a refusal."""

    def __init__(self) -> None:
        self.worker: WorkerProcess | None = None
        self._refusal: Refusal | None = None
        self._changed = asyncio.Event()

    def open(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self._changed.set()

    def shut(self) -> None:
        self.worker = None
        self._changed.clear()

    def close(self, refusal: Refusal) -> None:
        self.worker = None
        self._refusal = refusal
        self._changed.set()

    async def wait(self, timeout: float, what: str) -> WorkerProcess:
        """The worker to ask. Raises Refusal 503 after `timeout` seconds, or the refusal the gate was closed with."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not (self.worker and self.worker.alive) and self._refusal is None:
                    await self._changed.wait()
                    if self.worker is not None and not self.worker.alive:
                        self.shut()  # its death is noticed here before its runner notices it
        if self._refusal is not None:
            raise self._refusal
        if self.worker is None:
            raise Refusal(503, f"no worker was ready within {timeout:g} s: {what}")
        return self.worker
