"""The fixture that starts servers; their parts are in server_harness."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from server_harness import KEY, Running, Start, fake_settings, resolve_fake

from upweight.server import create_app
from upweight.server.reasons import ReasonProtocol


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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server: `start(behaviour, **settings)`; the home folder is the same for all of one test."""
    with servers(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for tests that need no worker of their own: its only place is taken, so that other jobs stay queued."""
    with servers(tmp_path_factory.mktemp("shared")) as begin:
        server = begin()
        server.create_job()
        yield server
