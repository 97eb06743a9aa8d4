"""The server's home folder: who owns it, where things lie in it, how a client on this machine finds the server.

Invariants:
* One server per home: `lock` is held with flock for the life of the process (a killed process frees it).
* `server.json` appears only once the server listens, and is always a complete document (written aside, then renamed).
* The API key lies in a file of mode 0600 and nowhere else in clear.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upweight.errors import ServerError, StoreError

# What a full or forbidden disk answers: nobody's bug, and it may be mended while the server runs.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
# What a machine that is short of something answers: it passes.
SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
PROBE = bytes(4096)  # a disk that is full may still make an empty file
QUANTISED_TO_FULL = 6  # a GGUF file of 4 to 6 bits per parameter is trained in 32


class Home:
    """Paths below one home folder. Creating the object creates the folders. Raises ServerError if it cannot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = root / "store.sqlite3"
        self.jobs = root / "jobs"
        self.files = root / "files"  # uploaded ones, each under its id
        self.models = root / "models"  # promoted from checkpoints
        self.logs = root / "logs"
        self.cache = root / "cache"
        self.run = root / "run"  # sockets and specs of the workers that run now
        self.key_file = root / "api_key"
        self.server_file = root / "server.json"
        self._lock: int | None = None
        try:
            for folder in (root, self.jobs, self.models, self.files, self.logs, self.cache, self.run):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = root / f".probe-{os.getpid()}"
            try:
                probe.write_bytes(PROBE)
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise ServerError(
                f"home folder {root} is not writable ({error.strerror}); set UPWEIGHT_HOME or use --home"
            ) from error

    def job_folder(self, job_id: str) -> Path:
        return self.jobs / job_id

    # A job's own copies of the files that it trains on and is validated with, in its folder.
    TRAINING_FILE, VALIDATION_FILE = "training.jsonl", "validation.jsonl"

    def start_model(self, job_id: str) -> Path:
        """Of a job that starts from a checkpoint of another."""
        return self.jobs / job_id / "start"

    def origin(self, job_id: str) -> Path:
        """The folder that holds that checkpoint, until the start model is made of it."""
        return self.jobs / job_id / "origin"

    def file(self, file_id: str) -> Path:
        return self.files / file_id

    def lock(self) -> None:
        """Own this home until `unlock` or the end of the process. Idempotent. Raises StoreError if another server does."""
        if self._lock is not None:
            return
        handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            other = self.read_server()
            who = f" (process {other['pid']}, {other['url']})" if other else ""
            raise StoreError(
                f"the store in {self.root} is in use by another server{who}; stop it or use another --home"
            ) from error
        self._lock = handle
        for left_over in self.run.iterdir():  # of a server that was killed
            shutil.rmtree(left_over, ignore_errors=True)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def api_key(self) -> tuple[str, bool]:
        """The key of this home and whether it was made just now. Raises ServerError for a file that holds none."""
        try:
            if key := self.key_file.read_text().strip():
                return key, False
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            text = f"the API key {self.key_file} cannot be read ({why}); mend it, or delete it and a new one is made"
            raise ServerError(text) from error
        key = new_key()
        write_atomically(self.key_file, key + "\n", mode=0o600)
        return key, True

    def read_server(self) -> dict[str, Any] | None:
        """What `server.json` says about the running server (url, pid), or None."""
        try:
            return json.loads(self.server_file.read_text())
        except (OSError, ValueError):
            return None

    def announce(self, url: str) -> None:
        write_atomically(self.server_file, json.dumps({"url": url, "pid": os.getpid()}) + "\n", mode=0o600)

    def withdraw(self) -> None:
        """Remove `server.json` if it is ours."""
        told = self.read_server()
        if told and told.get("pid") == os.getpid():
            self.server_file.unlink(missing_ok=True)

    def bytes_used(self) -> int:
        return folder_bytes(self.root)

    def bytes_free(self) -> int:
        return shutil.disk_usage(self.root).free


@dataclass(frozen=True)
class FoundServer:
    """A server that runs on this machine."""

    url: str
    pid: int
    api_key: str = field(repr=False)


def find_server(root: Path) -> FoundServer | None:
    """The running server of home folder `root`, for a client on the same machine; None if none runs. Changes nothing."""
    try:
        told = json.loads((root / "server.json").read_text())
        key = (root / "api_key").read_text().strip()
        os.kill(told["pid"], 0)
    except (OSError, ValueError):  # no file, half a file, or a process that is gone
        return None
    return FoundServer(url=told["url"], pid=told["pid"], api_key=key)


def new_key() -> str:
    """A fresh API key: 256 random bits."""
    return "uw-" + secrets.token_urlsafe(32)


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: those that were given and those that were taken away."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def model_bytes(path: Path) -> int:
    """What the model at `path` (folder or GGUF file) holds in memory or in a checkpoint, in 32 bits a parameter."""
    return folder_bytes(path) * (QUANTISED_TO_FULL if path.suffix == ".gguf" else 1)


def folder_bytes(root: Path) -> int:
    """Bytes of the regular files below `root`; files that vanish meanwhile count as 0."""
    if root.is_file():
        return root.stat().st_size
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total
