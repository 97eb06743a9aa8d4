"""The numbers of a running demo, gathered once for the terminal and for the JSON address."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import psutil

from upweight.rollout import RolloutRunner

INTERVAL = 0.5


class Monitor:
    """`snapshot()` is a dictionary of plain numbers and texts; a thread renews it twice a second.

    Use as a context manager. `address` answers GET with the same dictionary as JSON, on loopback and without a key: it
    tells numbers of this run only.
    """

    def __init__(self, *, earlier_seconds: float = 0.0) -> None:
        self._began = time.monotonic() - earlier_seconds
        self._phase = ("starting", "")
        self._planned: int | None = None
        self._runner: RolloutRunner | None = None
        self._fetch: Callable[[], dict[str, Any]] | None = None
        self._job: dict[str, Any] = {}
        self._training_began: tuple[float, int] | None = None
        self._after_seconds = 0.0
        self.peak_memory_bytes = 0
        self.cpu_seconds = 0.0
        self.on_tick: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="monitor", daemon=True)
        self._web = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._web.daemon_threads = True
        self._web_thread = threading.Thread(target=self._web.serve_forever, name="monitor-web", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        self._web_thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._web.shutdown()
        self._web.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._web.server_port}/"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def job(self) -> dict[str, Any]:
        """The job's progress as the server last told it."""
        return self._job

    def phase(self, name: str, detail: str = "") -> None:
        self._phase = (name, detail)

    def watch_job(self, url: str, key: str, job_id: str, planned: int) -> None:
        client = httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=5.0)
        path = f"{url}/v1alpha1/fine_tuning/jobs/{job_id}/progress"

        def fetch() -> dict[str, Any]:
            return client.get(path).raise_for_status().json()

        self._planned, self._fetch = planned, fetch
        self.refresh()

    def watch_runner(self, runner: RolloutRunner, evaluation_seconds: float) -> None:
        """`evaluation_seconds`: what comes after training, for the time left."""
        self._runner = runner
        self._after_seconds = evaluation_seconds
        self._training_began = (time.monotonic(), int(self._job.get("version") or 0))

    def refresh(self) -> None:
        """Asks the server now; an answer that does not come leaves the last one."""
        if self._fetch is not None:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                self._job = self._fetch()
        memory, cpu = _tree_costs()
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory)
        self.cpu_seconds = max(self.cpu_seconds, cpu)

    def snapshot(self) -> dict[str, Any]:
        job, worker = self._job, self._job.get("worker") or {}
        versions = job.get("versions", [])
        rewards = [v["metrics"]["reward_mean"] for v in versions if "reward_mean" in v["metrics"]]
        mismatch = [v["metrics"]["mismatch_max"] for v in versions if "mismatch_max" in v["metrics"]]
        told = self._runner.progress() if self._runner is not None else None
        return {
            "phase": self._phase[0],
            "detail": self._phase[1] or job.get("reason") or "",
            "seconds": round(self.seconds, 1),
            "seconds_left": self._seconds_left(),
            "batches": self._planned,
            "batches_filled": told.batches_filled if told else job.get("filled_batches", 0),
            "batch_size": job.get("batch_size"),
            "samples_in_batch": told.samples_in_batch if told else job.get("in_batch", 0),
            "in_flight": told.in_flight if told else 0,
            "rejected_groups": told.counts.rejected if told else 0,
            "waiting_for": told.waiting_for if told else None,
            "version": job.get("inference_version"),
            "rewards": [round(r, 4) for r in rewards],
            "mismatch_max": max(mismatch, default=None),
            "tokens_per_second": round(worker.get("tokens_per_second", 0.0), 1),
            "job_id": job.get("job_id"),
            "job_status": job.get("job_status"),
            "peak_memory_bytes": self.peak_memory_bytes,
        }

    def _seconds_left(self) -> float | None:
        if self._training_began is None or self._planned is None:
            return None
        began, first = self._training_began
        done = int(self._job.get("version") or 0) - first
        left = self._planned - first - done
        if done < 1:
            return None
        return round(left * (time.monotonic() - began) / done + self._after_seconds, 1)

    def _loop(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.refresh()
            self.on_tick()


def _tree_costs() -> tuple[int, float]:
    """Resident bytes now and CPU seconds so far of this process and everything below it, ended children included."""
    memory, cpu = 0, 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            memory += process.memory_info().rss
            cpu += sum(process.cpu_times()[:4])  # user, system, and both of the children that were waited for
    return memory, cpu


def _handler(monitor: Monitor) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(monitor.snapshot(), indent=1).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the terminal belongs to the display."""

    return Handler
