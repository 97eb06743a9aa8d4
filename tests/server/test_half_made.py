"""What fails half-way is never taken for whole, leaves nothing behind, and says why: exports, downloads, uploads, copies, starts."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from server_harness import KEY, Running, Start

LIMITED = """
import resource, sys
from pathlib import Path
from upweight.errors import StoreError
from upweight.server.backup import back_up
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
try:
    back_up(Path(sys.argv[1]), Path(sys.argv[2]))
except StoreError as error:
    print(error)
"""


def trained(start: Start, behaviour: dict[str, Any] | None = None, **more: Any) -> tuple[Running, str]:
    """A job with a checkpoint of version 1, which goes on."""
    server = start(behaviour, **more)
    job = server.create_job(num_batches=3, checkpoint_every=1)
    server.fill(job, 0)
    server.wait(job, lambda p: p["inference_version"] == 1)
    return server, job


def path_of(job: str, what: str) -> str:
    return f"/v1/fine_tuning/jobs/{job}/checkpoints/ftckpt-{job}-1/{what}"


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def connected(server: Running, head: str) -> socket.socket:
    url = urlsplit(str(server.http.base_url))
    client = socket.create_connection((url.hostname, url.port), 10)
    client.sendall(f"{head}\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode())
    return client


@pytest.mark.parametrize(
    ("behaviour", "status", "words"),
    [
        ({"full_exports": 100}, 507, "No space left on device"),
        ({"half_exports": "die"}, 503, "exit code 9"),
    ],
)
def test_an_export_that_fails_leaves_nothing_and_says_why(
    start: Start, behaviour: dict[str, Any], status: int, words: str
) -> None:
    server, job = trained(start, behaviour)
    for method, what in (("POST", "promote"), ("GET", "download")):
        refused = server.http.request(method, path_of(job, what))
        assert refused.status_code == status, refused.text
        assert words in refused.json()["detail"]
        assert names(server.home / "models") == []
    assert server.progress(job)["job_status"] == "waiting_for_samples"  # as undisturbed as before


def test_a_client_that_vanishes_in_a_download_leaves_no_copy(start: Start) -> None:
    server, job = trained(start, {"export_bytes": 30_000_000})
    client = connected(server, f"GET {path_of(job, 'download')} HTTP/1.1")
    client.sendall(b"\r\n")
    assert b"200" in client.recv(1000)
    assert names(server.home / "models") != []  # it waits for a client that reads nothing
    assert server.http.get("/healthz").status_code == 200
    client.close()
    until(lambda: names(server.home / "models") == [])


def test_connections_without_a_whole_request_end_and_hold_no_other(start: Start) -> None:
    server = start()
    server.server.config.timeout_keep_alive = 2
    url = urlsplit(str(server.http.base_url))
    silent = [socket.create_connection((url.hostname, url.port), 10) for _ in range(50)]
    dripping, whole = connected(server, "GET /healthz HTTP/1.1"), connected(server, "GET /healthz HTTP/1.1")
    whole.sendall(b"\r\n")
    answer = b""
    while not answer.endswith(b"}"):  # head and body may come apart
        answer += whole.recv(1000)
    assert b"200 OK" in answer
    began = time.monotonic()
    with contextlib.suppress(OSError):  # it is closed meanwhile
        while time.monotonic() < began + 6:
            dripping.sendall(b"X")
            time.sleep(0.1)
    assert server.http.get("/healthz").status_code == 200
    for one in [*silent, dripping, whole]:
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1000) == b""
        one.close()


def test_an_upload_that_is_cut_off_leaves_nothing(shared: Running) -> None:
    client = connected(shared, "POST /v1/files HTTP/1.1")
    client.sendall(b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 3000000\r\n\r\n")
    client.sendall(b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 2_000_000)
    files = shared.home / "files"
    until(lambda: any(name.startswith(".upload-") for name in names(files)))
    client.close()
    until(lambda: not any(name.startswith(".upload-") for name in names(files)))


def test_a_start_removes_what_was_half_made_and_keeps_the_rest(start: Start) -> None:
    server, job = trained(start)
    model = server.http.post(path_of(job, "promote")).json()["id"]
    server.stop()
    whole = {folder: names(server.home / folder) for folder in ("jobs", "models")}
    assert whole == {"jobs": [job], "models": [model]}
    halves = [server.home / "models" / name for name in (".ftmodel-a.partial", "ftmodel-b", ".ftmodel-c")]
    halves.append(server.home / "jobs" / "ftjob-never-stored")
    for half in halves:
        half.mkdir()
        (half / "model.safetensors").write_text("half")
    # A store that was put beside these things did not make them, and removes none.
    (server.home / "store.sqlite3").rename(server.home.parent / "store")
    for rest in server.home.glob("store.sqlite3-*"):
        rest.unlink()
    start().stop()
    assert all(half.exists() for half in halves)
    (server.home / "store.sqlite3").unlink()
    unknown = server.home / "jobs" / "ftjob-of-a-later-store" / "checkpoints"
    unknown.mkdir(parents=True)
    whole["jobs"] = sorted([*whole["jobs"], unknown.parent.name])
    (server.home.parent / "store").rename(server.home / "store.sqlite3")
    again = start()
    assert {folder: names(server.home / folder) for folder in whole} == whole
    assert again.http.get(f"/v1/models/{model}").status_code == 200


def test_a_backup_without_room_fails_instead_of_leaving_a_checkpoint_out(start: Start, tmp_path: Path) -> None:
    server, job = trained(start)
    state = server.home / "jobs" / job / "checkpoints" / "00000001" / "arrays"
    state.write_bytes(b"x" * 4_000_000)
    target = tmp_path / "copy"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(server.home), str(target)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(f"the backup to {target} failed: [Errno 27] File too large: {str(state)!r}")
    assert names(tmp_path) == ["home", "model"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_job_that_cannot_be_written_down_is_refused_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    server = start()

    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("upweight.server.integrations.write_atomically", full)
    method = {"type": "reinforcement", "reinforcement": {"batch_size": 2}}
    integrations = [{"type": "wandb", "wandb": {"project": "p"}}]
    body = {"model": server.model, "method": method, "integrations": integrations}
    refused: httpx.Response = server.http.post("/v1/fine_tuning/jobs", json=body)
    reason = f"the server cannot write to its disk: {os.strerror(number)}; nothing was stored"
    assert (refused.status_code, refused.json()["detail"]) == (507, reason)
    assert names(server.home / "jobs") == []
    assert server.http.get("/v1/fine_tuning/jobs").json()["data"] == []


def test_remains_of_a_killed_worker_go_with_the_next_export(start: Start) -> None:
    server, job = trained(start)
    half = server.home / "jobs" / job / ".weights.1x2y"  # as a worker leaves it
    half.mkdir()
    for index in (1, 2):
        server.fill(job, index)
    server.wait_status(job, "succeeded")
    assert not half.exists()
