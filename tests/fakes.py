"""A controllable job server: real HTTP on loopback, the wire contract of RL jobs, and faults on demand."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JOB = "job-1"


class _Listener(ThreadingHTTPServer):
    """A client that goes away in the middle is no news: its traceback would land in the output of whatever test runs by then."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    raw: bytes


@dataclass
class Reply:
    """Status 0 = the connection is closed without an answer."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Fault:
    """What happens to the next `times` requests whose path ends with `suffix`.

    `stored` = the request takes effect before the fault answers. A reply of None answers normally, after the delay.
    """

    suffix: str
    reply: Reply | None = None
    times: int = 1
    method: str | None = None
    stored: bool = False
    delay: float = 0.0


class FakeJobServer:
    """One job. `trains=True`: version k is published as soon as k batches are filled."""

    def __init__(
        self,
        *,
        batch_size: int = 4,
        version: int | None = 0,
        total_batches: int | None = None,
        trains: bool = True,
        tells_batch_size: bool = False,
        completion: Callable[[dict[str, Any]], str] = lambda body: "42",
        reports_version: bool = False,
        port: int = 0,
    ) -> None:
        self.batch_size = batch_size
        self.version = version
        self.total_batches = total_batches
        self.trains = trains
        self.tells_batch_size = tells_batch_size
        self.completion = completion
        self.reports_version = reports_version
        self.status_extra: dict[str, Any] = {}
        self.batches: dict[int, list[dict[str, Any]]] = {}
        self.ids: set[str] = set()
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.replies: dict[tuple[str, str], Reply] = {}
        self.metrics: list[dict[str, Any]] = []
        self.inference_delay = 0.0
        self.inference_now = self.inference_peak = 0
        self.lock = threading.RLock()
        self._http = _Listener(("127.0.0.1", port), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    # -- life

    def __enter__(self) -> FakeJobServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    # -- what tests ask

    @property
    def filled(self) -> int:
        return next(k for k in range(10**6) if len(self.batches.get(k, [])) < self.batch_size)

    def sizes(self) -> dict[int, int]:
        return {index: len(samples) for index, samples in sorted(self.batches.items()) if samples}

    def samples(self) -> list[dict[str, Any]]:
        return [sample for _, samples in sorted(self.batches.items()) for sample in samples]

    def worst_staleness(self) -> int:
        """Of the samples that carry a version; −1 if none does."""
        stamps = [
            (index, sample["debug_info"]["starting_inference_version"])
            for index, samples in self.batches.items()
            for sample in samples
            if "starting_inference_version" in sample["debug_info"]
        ]
        return max((index - 1 - version for index, version in stamps), default=-1)

    def count(self, method: str, suffix: str) -> int:
        return sum(r.method == method and r.path.split("?")[0].endswith(suffix) for r in self.requests)

    # -- what tests do

    def fail(self, suffix: str, status: int = 503, body: Any = None, **kw: Any) -> None:
        headers = kw.pop("headers", {})
        self.faults.append(Fault(suffix, Reply(status, body, headers), **kw))

    def put_samples(self, index: int, n: int) -> None:
        """Samples of somebody else."""
        with self.lock:
            for _ in range(n):
                name = f"foreign-{len(self.ids)}"
                self.ids.add(name)
                self.batches.setdefault(index, []).append({"id": name, "debug_info": {}})
            self._train()

    # -- routes

    def _train(self) -> None:
        if self.trains and self.version is not None:
            self.version = self.filled

    def answer(self, request: Request) -> Reply:
        path = request.path.split("?")[0]
        if (request.method, path) in self.replies:
            return self.replies[request.method, path]
        parts = path.removeprefix(f"/v1alpha1/fine_tuning/jobs/{JOB}/").split("/")
        if path.endswith("/chat/completions"):
            return self._chat(request.body)
        with self.lock:
            match request.method, parts:
                case "GET", ["status"]:
                    return Reply(body=self._status())
                case "POST", ["batches"]:
                    self.batches.setdefault(request.body["index"], [])
                    return Reply(body=self._batch(request.body["index"]))
                case "GET", ["batches", index] if int(index) in self.batches:
                    return Reply(body=self._batch(int(index)))
                case "POST", ["batches", index, "samples"]:
                    return self._store(int(index), request.body["samples"])
                case "POST", ["metrics"]:
                    self.metrics.append(request.body)
                    return Reply(body={"object": "fine_tuning.metrics"})
                case "POST", ["render"]:
                    return Reply(body={"token_ids": [1, 2], "text": request.body["messages"][0]["content"]})
                case "GET", ["inference", "openai", "v1", "models"]:
                    return Reply(body={"object": "list", "data": [{"id": "m", "object": "model"}]})
        return Reply(404, {"detail": f"no {path}"})

    def _status(self) -> dict[str, Any]:
        body = {
            "object": "fine_tuning.job.status",
            "inference_version": self.version,
            "total_batches": self.total_batches,
            "filled_batches": self.filled,
            **self.status_extra,
        }
        return {**body, "batch_size": self.batch_size} if self.tells_batch_size else body

    def _batch(self, index: int) -> dict[str, Any]:
        n = len(self.batches[index])
        status = "filled" if n >= self.batch_size else "filling"
        return {"object": "fine_tuning.batch", "index": index, "status": status, "sample_count": n}

    def _store(self, index: int, samples: list[dict[str, Any]]) -> Reply:
        if index not in self.batches:
            return Reply(404, {"detail": "no such batch"})
        new = [sample for sample in samples if sample["id"] not in self.ids]
        if len(self.batches[index]) + len(new) > self.batch_size:
            n = len(self.batches[index])
            return Reply(409, {"detail": "does not fit", "sample_count": n, "batch_size": self.batch_size})
        self.batches[index] += new
        self.ids |= {sample["id"] for sample in new}
        self._train()
        return Reply(body=self._batch(index))

    def _chat(self, body: dict[str, Any]) -> Reply:
        with self.lock:
            self.inference_now += 1
            self.inference_peak = max(self.inference_peak, self.inference_now)
            version = self.version
        time.sleep(self.inference_delay)
        text = self.completion(body)
        with self.lock:
            self.inference_now -= 1
        tokens = [21, 22, 2]
        content = [{"token": f"token_id:{t}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for t in tokens]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
            "token_ids": tokens,
            "logprobs": {"content": content, "refusal": None} if body.get("logprobs") else None,
        }
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
        }
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = [11, 12, 13]
        if self.reports_version:
            answer["inference_version"] = version
        return Reply(body=answer)

    # -- HTTP

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._serve("GET")

            def do_POST(self) -> None:
                self._serve("POST")

            def _serve(self, method: str) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if len(raw) < int(self.headers.get("Content-Length") or 0):
                    self.close_connection = True  # the client died while it sent this
                    return
                is_json = "json" in self.headers.get("Content-Type", "")
                body = json.loads(raw) if is_json and raw else None
                request = Request(method, self.path, dict(self.headers.items()), body, raw)
                reply = fake.handle(request)
                if reply.status == 0:
                    self.close_connection = True
                    return
                data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                try:
                    self.send_response(reply.status)
                    for name, value in {"Content-Type": "application/json", **reply.headers}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client gave up waiting

            def log_message(self, *args: Any) -> None:
                """Keep test output readable."""

        return Handler

    def handle(self, request: Request) -> Reply:
        with self.lock:
            self.requests.append(request)
            fault = self._take_fault(request)
        if fault is None:
            return self.answer(request)
        if fault.stored:
            self.answer(request)
        time.sleep(fault.delay)
        return fault.reply or self.answer(request)

    def _take_fault(self, request: Request) -> Fault | None:
        for fault in self.faults:
            path = request.path.split("?")[0]
            if path.endswith(fault.suffix) and fault.method in (None, request.method) and fault.times > 0:
                fault.times -= 1
                return fault
        return None


def calls_by_key(server: FakeJobServer) -> Counter[str]:
    """Attempts per logical POST."""
    return Counter(r.headers["Idempotency-Key"] for r in server.requests if r.method == "POST")
