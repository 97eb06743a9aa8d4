"""The real server as a child process, with the real worker on a tiny model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from upweight.api_client import TokenFactory
from upweight.demo.server_process import ServerProcess

BATCH, GROUP = 8, 4


@dataclass
class Site:
    """A home folder, the server that runs on it, and ways to look at a job."""

    home: Path
    model: str
    server: ServerProcess

    @property
    def client(self) -> TokenFactory:
        return TokenFactory(self.server.url, self.server.key)

    def restart(self) -> None:
        self.server = ServerProcess(self.home)

    def create(self, **reinforcement: Any) -> str:
        settings = {"batch_size": BATCH, "num_batches": 3, "sampling": {"max_tokens": 6}, **reinforcement}
        with self.client as client:
            job = client.v1.fine_tuning.jobs.create(
                model=self.model, training_file="", method={"type": "reinforcement", "reinforcement": settings}
            )
        return job.id

    def progress(self, job_id: str) -> dict[str, Any]:
        answer = httpx.get(
            f"{self.server.url}/v1alpha1/fine_tuning/jobs/{job_id}/progress",
            headers={"Authorization": f"Bearer {self.server.key}"},
            timeout=30,
        )
        return answer.raise_for_status().json()

    def wait(self, job_id: str, status: str = "succeeded", timeout: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            now = self.progress(job_id)
            if now["job_status"] == status:
                return now
            assert now["job_status"] not in ("failed", "cancelled", "succeeded"), now["reason"]
            time.sleep(0.1)
        raise AssertionError(f"job is {now['job_status']}, not {status}: {now['reason']}")


@pytest.fixture
def site(tmp_path: Path, tiny_model_folder: Path) -> Iterator[Site]:
    running = Site(tmp_path / "home", str(tiny_model_folder), ServerProcess(tmp_path / "home"))
    yield running
    running.server.stop()
