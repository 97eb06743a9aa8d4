"""The job server under load, beside its floors in the same run; and its calls with a thousand and a million stored samples.

    python -m benchmarks.server.run [--sizes 1,8,32] [--samples 51200] [--tokens 512] [--stored 1000000] [--rounds 3]

JSON on standard output. `uploads`: by samples a request, the samples per second that 100 connections bring in (each request answered
after its commit), against an echo route on the same protocol stack and raw `executemany` of the same rows. `status`: milliseconds of a status
call, idle and under that load. `stored`: milliseconds of the calls behind the page and the lists, and the CPU seconds of a start,
with few and with many samples (short ones, 8 tokens: said in `tokens`). No job runs: the worker is a program that sleeps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from benchmarks.server.floors import insert_rows
from upweight.server.store import batches, counts, jobs
from upweight.server.store.database import Database

SHORT, BATCH = 8, 1000
CALLS = {
    "jobs": "v1/fine_tuning/jobs",
    "job": "v1/fine_tuning/jobs/{job}",
    "events": "v1/fine_tuning/jobs/{job}/events",
    "status": "v1alpha1/fine_tuning/jobs/{job}/status",
    "progress": "v1alpha1/fine_tuning/jobs/{job}/progress",
    "waiting": "v1alpha1/fine_tuning/jobs/{job}/waiting",
    "samples": "v1alpha1/fine_tuning/jobs/{job}/samples?limit=20",
    "samples, in the middle": "v1alpha1/fine_tuning/jobs/{job}/samples?limit=20&after={middle}-0",
    "one sample": "v1alpha1/fine_tuning/jobs/{job}/samples/s500",
    "search": "v1alpha1/fine_tuning/jobs/{job}/samples?search=nowhere",
    "staleness of a batch": "v1alpha1/fine_tuning/jobs/{job}/staleness?batch=0",
}


@contextlib.contextmanager
def server(home: Path) -> Iterator[tuple[str, str, psutil.Process]]:
    """URL, key and process of a server that is ready."""
    (home / "server.json").unlink(missing_ok=True)
    environment = {
        **os.environ,
        "UPWEIGHT_WORKER_COMMAND": '["sh", "-c", "sleep 100000", "sh"]',
        "UPWEIGHT_DISK_BUDGET_GB": "1000",
    }
    command = [sys.executable, "-m", "upweight.server", "--home", str(home), "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        while not (home / "server.json").exists():
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.01)
        url = json.loads((home / "server.json").read_text())["url"]
        yield url, (home / "api_key").read_text().strip(), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def load(what: str, url: str, key: str, path: str, **options: Any) -> subprocess.Popen[str]:
    more = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "benchmarks.server.load", what, url, key, path, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the load ended with {process.returncode}")
    answer: dict[str, Any] = json.loads(output)
    return answer


def new_job(http: httpx.Client, model: Path, batch_size: int) -> str:
    method = {"type": "reinforcement", "reinforcement": {"batch_size": batch_size}}
    answer = http.post("v1/fine_tuning/jobs", json={"model": str(model), "method": method})
    job = answer.raise_for_status().json()["id"]
    http.post(f"v1alpha1/fine_tuning/jobs/{job}/batches", json={"index": 0}).raise_for_status()
    return str(job)


def one_round(folder: Path, model: Path, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """`size`: samples a request."""
    total = options.samples if size > 1 else options.samples // 4
    sizes = {"requests": total // size, "samples": size, "tokens": options.tokens}
    rows = [sys.executable, "-m", "benchmarks.server.floors", "rows", str(folder), f"--tokens={options.tokens}"]
    rows_floor = json.loads(subprocess.check_output([*rows, f"--samples={total}"]))
    echo_floor = echo(folder, sizes)
    with server(folder / "home") as (url, key, process):
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as http:
            job = new_job(http, model, 10 * total)
        status = f"/v1alpha1/fine_tuning/jobs/{job}/status"
        idle = told(load("status", url, key, status, seconds=5))
        before = sum(process.cpu_times()[:2])
        uploads = load("uploads", url, key, f"/v1alpha1/fine_tuning/jobs/{job}/batches/0/samples", **sizes)
        assert uploads.stdout is not None
        uploads.stdout.readline()  # all is encoded
        busy = told(load("status", url, key, status, seconds=options.busy_seconds))
        reached = told(uploads)
        cpu = sum(process.cpu_times()[:2]) - before
    return {
        "rows": rows_floor,
        "echo": echo_floor,
        "server": {**reached, "cpu_seconds": cpu},
        "idle": idle,
        "busy": busy,
    }


def echo(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    port_file = folder / "port"
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.server.floors", "echo", str(port_file)])
    try:
        while not (port_file.exists() and port_file.read_text()):
            time.sleep(0.02)
        time.sleep(0.5)
        return told(load("uploads", f"http://127.0.0.1:{port_file.read_text()}", "key", "/echo", **sizes))
    finally:
        process.terminate()
        process.wait()


def stored(folder: Path, model: Path, count: int) -> dict[str, Any]:
    """Milliseconds (median of 15) of the calls, and the start, with `count` samples of a paused job."""
    home = folder / "home"
    home.mkdir(parents=True)
    settings = {
        "batch_size": BATCH,
        "num_batches": None,
        "advantage": "given",
        "algorithm": "grpo",
        "lora": None,
        "seed": 0,
    }
    database = Database(home / "store.sqlite3")

    def make(connection: Any) -> str:
        request = {"model_name": "m", "method_type": "reinforcement"}
        more = {"model": "m", "model_path": str(model), "request": request, "settings": settings}
        job = jobs.create_job(connection, project="default", **more)
        jobs.pause(connection, job.id)
        for index in range(count // BATCH):
            batches.create_batch(connection, jobs.get_job(connection, job.id), index)
            batches.set_count(connection, job, index, BATCH, at=time.time())
        counts.add(connection, job.id, {"accepted": count})
        return job.id

    job = database.submit(make).result()
    database.close()
    insert_rows(home / "store.sqlite3", job, count, SHORT, per_batch=BATCH, per_commit=20_000)
    took = {}
    with (
        server(home) as (url, key, process),
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as http,
    ):
        start = sum(process.cpu_times()[:2])
        for name, path in CALLS.items():
            times = []
            for _ in range(15):
                began = time.perf_counter()
                http.get(path.format(job=job, middle=count // BATCH // 2)).raise_for_status()
                times.append(time.perf_counter() - began)
            took[name] = 1000 * median(times)
    size = (home / "store.sqlite3").stat().st_size
    return {"samples": count, "tokens": SHORT, "bytes": size, "start_cpu_seconds": start, "ms": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,8,32", help="samples a request")
    parser.add_argument(
        "--samples", type=int, default=51_200, help="a round; a quarter of them where each is a request"
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy-seconds", type=float, default=3.0)
    parser.add_argument("--stored", type=int, default=1_000_000, help="0 = leave that part out")
    options = parser.parse_args()
    result: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    folder = Path(tempfile.mkdtemp(prefix="upweight-bench-"))
    try:
        model = folder / "model.gguf"
        model.write_bytes(b"x")
        rounds: dict[int, list[dict[str, Any]]] = {int(size): [] for size in options.sizes.split(",")}
        for number in range(options.rounds):
            for size, made in rounds.items():
                (place := folder / f"{number}-{size}").mkdir()
                made.append(one_round(place, model, size, options))
                shutil.rmtree(place)
        result["rounds"] = rounds
        result["uploads"] = {size: figures(made) for size, made in rounds.items()}
        if options.stored:
            few, many = (
                stored(folder / name, model, count) for name, count in (("few", 1000), ("many", options.stored))
            )
            ratios = {name: many["ms"][name] / few["ms"][name] for name in CALLS}
            result["stored"] = {"few": few, "many": many, "ratios": ratios, "largest_ratio": max(ratios.values())}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=1))


def figures(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds, and the shares that are aimed at."""

    def middle(part: str, name: str) -> float:
        return median(one[part][name] for one in rounds)

    speeds = {part: middle(part, "samples_per_second") for part in ("server", "echo", "rows")}
    return {
        **{f"{part}_samples_per_second": speed for part, speed in speeds.items()},
        "share_of_smaller_floor": speeds["server"] / min(speeds["echo"], speeds["rows"]),
        "cpu_ms_per_sample": 1000 * median(one["server"]["cpu_seconds"] / one["server"]["samples"] for one in rounds),
        "status_p99_ms_idle": middle("idle", "p99_ms"),
        "status_p99_ms_busy": middle("busy", "p99_ms"),
        "status_p99_ratio": middle("busy", "p99_ms") / middle("idle", "p99_ms"),
    }


if __name__ == "__main__":
    main()
