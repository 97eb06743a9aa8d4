"""The server as a process: checks first, then listens, says where, and stops in order.

Invariants:
* What cannot work is one clear line (ServerError, StoreError), before anything listens.
* Listening wider than this machine is warned of, whoever starts the server.
* SIGUSR1 writes the stacks of all threads to standard error; a worker writes them to its job's log.
* SIGTERM, SIGINT and (with `parent_pipe`) the end of standard input stop it: requests get 1 s, workers `worker_stop_timeout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from upweight.errors import ServerError
from upweight.server.api.app import create_app
from upweight.server.api.context import ResolveModel
from upweight.server.home import Home
from upweight.server.log_lines import LogFile, LogFormat
from upweight.server.reasons import ReasonProtocol
from upweight.server.settings import Settings
from upweight.server.store.database import Database

REQUEST_GRACE = 1  # seconds
# That a thread keeps the interpreter while others want it: the writer and readers of the store do.
SWITCH_SECONDS = 0.0002
COLLECT_AFTER = 5000  # new objects


@dataclass(frozen=True)
class Ready:
    """What a server that listens has to tell."""

    url: str
    home: Path
    key_file: Path
    new_key: str | None = field(repr=False)  # the API key if this start made it, to be shown once


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def tell(ready: Ready) -> None:
    """The lines of `serve`."""
    print(f"upweight server: {ready.url}  home {ready.home}", flush=True)
    if ready.new_key is not None:
        print(f"upweight server: API key {ready.new_key} (also in {ready.key_file})", flush=True)


def run(
    settings: Settings,
    *,
    resolve_model: ResolveModel | None = None,
    on_ready: Callable[[Ready], None] = tell,
) -> None:
    """Serve until told to stop; `on_ready` is called once the server listens and `server.json` is written.

    Raises ServerError or StoreError when the server cannot start.
    """
    if not is_loopback(settings.host):
        print(
            f"warning: {settings.host} may be reached from other machines, and the server has no TLS: keys and data travel"
            " in clear. Put a TLS proxy before it, or keep 127.0.0.1 and use an SSH tunnel.",
            file=sys.stderr,
        )
    home = Home(settings.home)
    home.lock()  # from here to the end: a second server is told in one line, before anything listens
    try:
        _run(home, settings, resolve_model, on_ready)
    finally:
        home.unlock()


def _run(home: Home, settings: Settings, resolve_model: ResolveModel | None, on_ready: Callable[[Ready], None]) -> None:
    Database(settings.store or home.store, alone=True).close()  # a broken file is told in one line too
    listener = _listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key, key_is_new = home.api_key()

    def ready() -> None:
        home.announce(url)
        on_ready(Ready(url, home.root, home.key_file, key if key_is_new else None))

    _log_to(home, settings.log_format)
    _allow_many_files()
    faulthandler.register(signal.SIGUSR1)
    app = create_app(settings, resolve_model=resolve_model, home=home)
    logging.getLogger("uvicorn.error").addFilter(lambda _: _start_error(app) is None)  # raised below, in one line
    config = uvicorn.Config(
        app,
        http=ReasonProtocol,
        log_level="warning",
        access_log=False,
        lifespan="on",
        proxy_headers=False,
        timeout_graceful_shutdown=REQUEST_GRACE,
        timeout_keep_alive=75,
    )
    server = _Server(config, ready)
    with contextlib.closing(listener), contextlib.suppress(SystemExit):  # which uvicorn raises when the start fails
        asyncio.run(_serve(server, listener, settings.parent_pipe))
    if not server.started:
        raise _start_error(app) or ServerError("the server did not start; the lines above say why")


def _start_error(app: FastAPI) -> Exception | None:
    return getattr(app.state, "start_error", None)


def _allow_many_files() -> None:
    """Each connection is one, and many systems allow 1024 unless asked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # as many as there are, then
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _log_to(home: Home, log_format: LogFormat) -> None:
    """What the server does goes to logs/server.log; keys and bodies are never logged."""
    root = logging.getLogger("upweight.server")
    root.addHandler(LogFile(home.logs / "server.log", log_format))
    root.setLevel(logging.INFO)


def _answer_quickly() -> None:
    """No call waits long for the interpreter, nor for a garbage collection that looks through all modules again."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


class _Server(uvicorn.Server):
    """Tells when it listens, and leaves signals to `_serve`."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            _answer_quickly()
            self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: _Server, listener: socket.socket, parent_pipe: bool) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if parent_pipe:
        threading.Thread(target=_await_end_of_input, args=(loop, stop), daemon=True).start()
    await server.serve(sockets=[listener])


def _await_end_of_input(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    while os.read(0, 4096):
        continue
    with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped already
        loop.call_soon_threadsafe(stop)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ServerError with one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio switches Nagle's algorithm off; without it each answer waits 40 ms for the client's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ServerError(
                f"port {port} is taken on {host}; use --port with another one, or --port 0 for any free one"
            ) from error
        raise ServerError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; check --host and --port"
        ) from error
    listener.setblocking(False)
    return listener
