"""A real server on loopback, in a thread, with a real store and the fake worker."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn

from upweight.errors import ModelNotFound
from upweight.server import Settings, create_app
from upweight.server.reasons import ReasonProtocol

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
KEY = "uw-test-key"


def resolve_fake(name: str) -> SimpleNamespace:
    """Any existing file or folder is a model."""
    if not Path(name).exists():
        raise ModelNotFound(f"model {name!r} is not on this machine; download it first")
    return SimpleNamespace(path=name, name=Path(name).name)


def fake_settings(home: Path, behaviour: dict[str, Any] | None = None, **more: Any) -> Settings:
    home.mkdir(exist_ok=True)
    file = home / "behaviour.json"
    file.write_text(json.dumps(behaviour or {}))
    (home / "api_key").write_text(KEY)
    quick = {"restart_backoff": 0.05, "worker_poll_interval": 0.1, "inference_wait": 10.0}
    command = (sys.executable, str(FAKE_WORKER), str(file))
    return Settings(home=home, port=0, worker_command=command, **{**quick, **more})


@dataclass
class Running:
    """A server in a thread and a client that holds its key."""

    server: uvicorn.Server
    thread: threading.Thread
    http: httpx.Client
    home: Path
    model: str

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.http.close()

    def create_job(self, **reinforcement: Any) -> str:
        settings = {"batch_size": 2, "num_batches": 2, **reinforcement}
        method = {"type": "reinforcement", "reinforcement": settings}
        answer = self.http.post("/v1/fine_tuning/jobs", json={"model": self.model, "method": method})
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def rl(self, job: str, path: str) -> str:
        return f"/v1alpha1/fine_tuning/jobs/{job}/{path}"

    def status(self, job: str) -> dict[str, Any]:
        return self.http.get(self.rl(job, "status")).json()

    def progress(self, job: str) -> dict[str, Any]:
        return self.http.get(self.rl(job, "progress")).json()

    def events(self, job: str) -> list[str]:
        data = self.http.get(f"/v1/fine_tuning/jobs/{job}/events", params={"limit": 100}).json()["data"]
        return [event["message"] for event in reversed(data)]

    def upload(self, job: str, index: int, samples: list[dict[str, Any]]) -> httpx.Response:
        return self.http.post(self.rl(job, f"batches/{index}/samples"), json={"samples": samples})

    def fill(self, job: str, index: int, count: int = 2) -> None:
        assert self.http.post(self.rl(job, "batches"), json={"index": index}).status_code == 200
        # A task of its own for each batch: what a batch trains on does not depend on which others are stored already.
        own = {"task_id": f"t{index}", "reward": 0.5}
        answer = self.upload(job, index, [sample(f"s{index}-{i}", debug_info=own) for i in range(count)])
        assert answer.status_code == 200, answer.text

    def wait(self, job: str, condition: Callable[[dict[str, Any]], bool], seconds: float = 15) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while not condition(now := self.progress(job)):
            assert time.monotonic() < end, (now, self.events(job))
            time.sleep(0.03)
        return now

    def wait_status(self, job: str, *states: str) -> dict[str, Any]:
        return self.wait(job, lambda p: p["job_status"] in states)


def sample(id: str, **changes: Any) -> dict[str, Any]:
    return {
        "object": "fine_tuning.rl_sample",
        "id": id,
        "token_ids": [11, 12, 13, 21, 22, 2],
        "logprobs": [0.0, 0.0, 0.0, -0.1, -0.2, -0.3],
        "mask": [0, 0, 0, 1, 1, 1],
        "normalized_reward": 1.0,
        "metadata": {},
        "debug_info": {"task_id": "t", "reward": 0.5},
        **changes,
    }


Start = Callable[..., Running]


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Start]:
    running: list[Running] = []
    model = folder / "model"
    model.mkdir()
    (model / "weights").write_bytes(b"x" * 1000)

    def begin(behaviour: dict[str, Any] | None = None, **more: Any) -> Running:
        settings = fake_settings(folder / "home", behaviour, **more)
        app = create_app(settings, resolve_model=resolve_fake)
        # The loop that `upweight.server.process` runs on; uvloop would fork this process, which may hold JAX's threads.
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                port=0,
                loop="asyncio",
                http=ReasonProtocol,
                log_level="warning",
                lifespan="on",
                timeout_graceful_shutdown=1,
            )
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        end = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < end
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {KEY}"}, timeout=30
        )
        running.append(Running(server, thread, client, settings.home, str(model)))
        return running[-1]

    try:
        yield begin
    finally:
        for one in running:
            if one.thread.is_alive():
                one.stop()
