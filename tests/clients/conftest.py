"""A worker's HTTP app with a live engine over a tiny model, in this process, and the public clients of both APIs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import uvicorn

from tests.clients.harness import Served
from upweight.server.worker.app import make_app
from upweight.server.worker.core import WorkerCore
from upweight.server.worker_protocol import WorkerMode, WorkerSpec


@pytest.fixture(scope="session")
def served(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One worker for all tests of the folder; tests leave its engine empty."""
    spec = WorkerSpec(
        job_id="ftjob-1",
        mode=WorkerMode.SERVE,
        model=str(tiny_model_folder),
        model_names=["tiny", "ftjob-1"],
        socket="",
        folder=str(tmp_path_factory.mktemp("worker")),
        max_slots=4,
        max_queue=64,
        request_timeout=60.0,
    )
    core = WorkerCore(spec)
    core.start()
    core.wait_ready()
    server = uvicorn.Server(uvicorn.Config(make_app(core), port=0, loop="asyncio", log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=60) as http:
        yield Served(core, url, http)
    server.should_exit = True
    thread.join(10)
    core.engine.stop()


@pytest.fixture(scope="session")
def openai_client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/openai/v1", api_key="k", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def anthropic_client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"{served.url}/openai", api_key="k", max_retries=0, timeout=60) as client:
        yield client
