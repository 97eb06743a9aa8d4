"""The real server as a child process that ends with its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from upweight.errors import ServerError

START_TIMEOUT = 60.0
STOP_TIMEOUT = 8.0


class ServerProcess:
    """`python -m upweight.server` on a free loopback port; use as a context manager."""

    def __init__(self, home: Path, *, on_wait: Callable[[str], None] = lambda _: None) -> None:
        self.home = home
        self._output = home / "logs" / "demo-server.log"
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._process = self._start()
        self.url = self._await_address(on_wait)
        self.key = (home / "api_key").read_text().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> str | None:
        """Why the server is gone, None while it runs."""
        if self._process.poll() is None:
            return None
        lines = [line for line in self._output.read_text().splitlines() if line.strip()]
        silent = (
            f"it ended with exit code {self._process.returncode} and without a word; is the disk of {self.home} full?"
        )
        return (lines or [silent])[-1].removeprefix("upweight server: ")

    def stop(self) -> None:
        """In order first, by force after 8 s."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "upweight.server", "--home", str(self.home), "--port", "0", "--parent-pipe"]
        with self._output.open("wb") as output:
            # A session of its own: Ctrl-C is for this process, which then stops the server in order.
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )

    def _await_address(self, on_wait: Callable[[str], None]) -> str:
        began = time.monotonic()
        while time.monotonic() - began < START_TIMEOUT:
            if (why := self.ended()) is not None:
                raise ServerError(why)
            told = self._told()
            if told is not None and told.get("pid") == self._process.pid:
                return str(told["url"])
            on_wait("starting the server")
            time.sleep(0.05)
        os.killpg(self._process.pid, signal.SIGKILL)
        raise ServerError(f"the server did not listen within {START_TIMEOUT:.0f} s; see {self._output}")

    def _told(self) -> dict[str, object] | None:
        try:
            return json.loads((self.home / "server.json").read_text())
        except (OSError, ValueError):
            return None
