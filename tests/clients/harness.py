"""A worker that serves in this process."""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx

from upweight.server.worker.core import WorkerCore


@dataclass
class Served:
    core: WorkerCore
    url: str
    http: httpx.Client

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(f"/openai/v1/{path}", json=body)

    def quiet(self, seconds: float = 10) -> None:
        """Waits until the engine holds no request."""
        end = time.monotonic() + seconds
        while (stats := self.core.engine.stats())["active_tasks"] + stats["waiting_queue"]:
            assert time.monotonic() < end, stats
            time.sleep(0.01)
