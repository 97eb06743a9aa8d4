"""A worker that speaks the worker protocol without model, engine or JAX.

`fake_worker.py BEHAVIOUR.json SPEC.json`. Its "weights" are a hash over all batches so far, so equal batches in equal order give equal
fingerprints. BEHAVIOUR: die_in_training [batch indices, each once], corrupt_after_restart (bool), skip_updates (bool),
train_seconds, generate_seconds, fates, hang_in_training [batch indices, first start only],
die_at_start (bool), ignore_sigterm (bool), cannot_load (bool), full_exports (how many find the disk full), export_bytes (a file of that
size beside the weights' own), half_exports ("die" or "hang" when half is written).
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import socketserver
import sys
import threading
import time
from dataclasses import dataclass, fields
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

BEHAVIOUR = json.loads(Path(sys.argv[1]).read_text())
SPEC = json.loads(Path(sys.argv[2]).read_text())
FOLDER = Path(SPEC["folder"])
HUNG = threading.Event()


@dataclass
class FileBatch:
    """What the real worker reads itself: which rows of the file come next."""

    index: int
    num_samples: int
    file: bytes


def rows_of_file(index: int) -> FileBatch:
    settings = SPEC["settings"]
    rows, size = settings["rows"], settings["batch_size"]
    count = min(size, rows - index % -(-rows // size) * size)
    return FileBatch(index, count, Path(SPEC["training_file"]).read_bytes())


def batch_metrics(batch: Any) -> dict[str, float]:
    if isinstance(batch, FileBatch):
        count = float(batch.num_samples)
        return {"samples_trained": count, "samples_masked": 0.0, "trained_tokens": 3 * count}
    return {"matched": float(batch.matched.sum()), "temperature": float(batch.temperature[batch.mask > 0][0])}


class Weights:
    def __init__(self) -> None:
        self.version = 0
        self.fingerprint = hashlib.sha256(SPEC["model"].encode()).hexdigest()
        exported = Path(SPEC["model"]) / "model.safetensors"
        if exported.exists() and exported.stat().st_size == len(self.fingerprint):  # of a fake worker's own export
            self.fingerprint = exported.read_text()
        if SPEC["checkpoint"]:
            saved = json.loads((Path(SPEC["checkpoint"]) / "state.json").read_text())
            self.version, self.fingerprint = saved["version"], saved["fingerprint"]

    def train(self, batch: Any) -> None:
        if not BEHAVIOUR.get("skip_updates"):
            digest = hashlib.sha256(self.fingerprint.encode())
            for field in fields(batch):
                value = getattr(batch, field.name)
                digest.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())
            if BEHAVIOUR.get("corrupt_after_restart") and self.restarted():
                digest.update(b"other")
            self.fingerprint = digest.hexdigest()
        self.version += 1

    def restarted(self) -> bool:
        return (FOLDER / "starts").read_text().count("\n") > 1

    def save(self) -> Path:
        path = FOLDER / "checkpoints" / f"{self.version:08d}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "state.json").write_text(json.dumps({"version": self.version, "fingerprint": self.fingerprint}))
        return path


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def address_string(self) -> str:
        return "unix"

    def answer(self, content: dict, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        if HUNG.is_set():
            time.sleep(1000)
        if self.path == "/state":
            stats = {"total_tokens": 7.0}
            self.answer(
                {"phase": "ready", "version": WEIGHTS.version, "fingerprint": WEIGHTS.fingerprint, "stats": stats}
            )
        elif self.path == "/stats":
            task = {"tokens": 3}
            self.answer(
                {
                    "request_timeout": SPEC["request_timeout"],
                    "total_tasks": 4,
                    "total_tokens": 12,
                    "avg_ttft_ms": 5.0,
                    "tokens_by_version": {"0": 12},
                    "recent_tasks": [task],
                }
            )
        elif self.path.startswith("/openai/v1/models/"):
            name = self.path.rpartition("/")[2]
            self.answer({"id": name, "object": "model", "created": 1, "owned_by": "x"})
        else:
            data = [{"id": name, "object": "model", "created": 1, "owned_by": "x"} for name in SPEC["model_names"]]
            self.answer({"object": "list", "data": data})

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        body = self.body()
        if url.path == "/train":
            self.train(int(parse_qs(url.query)["batch_index"][0]), body)
        elif url.path == "/checkpoint":
            self.answer({"path": str(WEIGHTS.save()), "version": WEIGHTS.version})
        elif url.path == "/export" and self.disk_is_full():
            self.answer({"detail": "OSError: [Errno 28] No space left on device"}, 500)
        elif url.path == "/export":
            path = Path(json.loads(body)["path"])
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.json").write_text("{}")
            self.stop_half_way(path)
            size = BEHAVIOUR.get("export_bytes", 0)
            (path / "model.safetensors").write_text(WEIGHTS.fingerprint + " " * size)
            self.answer({"path": str(path)})
        elif url.path == "/render":
            self.answer({"token_ids": [1, 2, 3], "text": "abc"})
        else:
            self.complete(json.loads(body))

    def stop_half_way(self, path: Path) -> None:
        how = BEHAVIOUR.get("half_exports")
        beside = path.with_name(f".{path.name}.half")  # as the real worker names what is not whole
        if how is not None:
            beside.mkdir()
            (beside / "model.safetensors").write_text("half")
        if how == "die":
            os._exit(9)
        time.sleep(1000 if how == "hang" else 0)

    def disk_is_full(self) -> bool:
        BEHAVIOUR["full_exports"] = BEHAVIOUR.get("full_exports", 0) - 1
        return BEHAVIOUR["full_exports"] >= 0

    def train(self, index: int, body: bytes) -> None:
        if index != WEIGHTS.version:
            return self.answer({"detail": f"version is {WEIGHTS.version}"}, 409)
        from upweight.server.worker_protocol import decode_batch  # on use: most tests wait for the start only

        batch = decode_batch(body) if body else rows_of_file(index)
        time.sleep(BEHAVIOUR.get("train_seconds", 0))
        if index in BEHAVIOUR.get("hang_in_training", []) and not WEIGHTS.restarted():
            HUNG.set()
            time.sleep(1000)
        marker = FOLDER / f"died-{index}"
        if index in BEHAVIOUR.get("die_in_training", []) and not marker.exists():
            marker.touch()
            print(f"fake worker: out of memory in batch {index}", file=sys.stderr, flush=True)
            os._exit(7)
        WEIGHTS.train(batch)
        fates = BEHAVIOUR.get("fates") or ["trained"] * batch.num_samples
        return self.answer(
            {
                "version": WEIGHTS.version,
                "fingerprint": WEIGHTS.fingerprint,
                "fingerprint_ok": True,
                "update_skipped": bool(BEHAVIOUR.get("skip_updates")),
                "metrics": {"loss": 0.5, "mismatch_max": 0.0, **batch_metrics(batch)},
                "fates": fates,
                "seconds": 0.01,
            }
        )

    def complete(self, asked: dict) -> None:
        until = time.monotonic() + BEHAVIOUR.get("generate_seconds", 0)
        while time.monotonic() < until:
            readable, _, _ = select.select([self.connection], [], [], 0.05)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                (FOLDER / "abandoned").touch()
                self.close_connection = True
                return None
        if str(asked.get("model")).startswith("status "):
            return self.refuse(*asked["model"].split()[1:])
        if asked.get("model") == "breaks":
            return self.break_off(asked)
        if asked.get("model") == "unknown":
            return self.answer({"error": {"message": "no such model", "type": "t", "param": None, "code": None}}, 404)
        prompt, output = [11, 12, 13], [21, 22, 2]
        logprobs = [-0.1, -0.2, -0.3]
        content = [
            {"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []}
            for t, p in zip(output, logprobs, strict=True)
        ]
        if asked.get("stream"):
            return self.stream(prompt, output, content)
        return self.answer(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": asked.get("model"),
                "prompt_token_ids": prompt,
                "inference_version": WEIGHTS.version,
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": "42"},
                        "token_ids": output,
                        "raw_logprobs": [-0.4, -0.5, -0.6],
                        "logprobs": {"content": content, "refusal": None},
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
            }
        )

    def refuse(self, status: str, retry_after: str = "") -> None:
        body = json.dumps({"error": {"message": f"refused with {status}", "type": "t", "param": None, "code": None}})
        self.send_response(int(status))
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def break_off(self, asked: dict) -> None:
        """Ends in the middle of the answer; the second time a stream is not asked for, all of it comes."""
        marker = FOLDER / "broken"
        if marker.exists():
            return self.complete({**asked, "model": "m"})
        marker.touch()
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"data: {}\n\ndata: {" if asked.get("stream") else b'{"id": "ch')
        self.close_connection = True
        return None

    def stream(self, prompt: list[int], output: list[int], content: list[dict]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for position, token in enumerate(output):
            choice = {"index": 0, "delta": {"content": "4"}, "token_ids": [token]}
            choice["logprobs"] = {"content": [content[position]]}
            event = {"object": "chat.completion.chunk", "choices": [choice], "inference_version": WEIGHTS.version}
            self.chunk(b"data: " + json.dumps(event | ({"prompt_token_ids": prompt} if position == 0 else {})).encode())
        self.chunk(b"data: [DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        data += b"\n\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


def die_with_parent() -> None:
    while os.read(0, 4096):
        continue
    os._exit(0)


if BEHAVIOUR.get("die_at_start"):
    print("fake worker: cannot load", file=sys.stderr, flush=True)
    sys.exit(5)
if BEHAVIOUR.get("cannot_load"):
    print("error: gemma7 is not a model that can be run here", file=sys.stderr, flush=True)
    sys.exit(3)
with (FOLDER / "starts").open("a") as starts:
    starts.write(f"{os.getpid()}\n")
if BEHAVIOUR.get("ignore_sigterm"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    threading.Thread(target=die_with_parent, daemon=True).start()
WEIGHTS = Weights()
Server(SPEC["socket"], Handler).serve_forever(poll_interval=0.1)
