"""64 open-loop clients over a worker's HTTP routes: time to first token and between tokens, alone and beside training steps."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from upweight.ops.samples import TrainBatch
from upweight.server.methods import Reinforcement
from upweight.server.worker_protocol import WorkerSpec, encode_batch

CLIENTS, PER_CLIENT, TOKENS = 64, 2, 32
EVERY = 20.0  # mean seconds between two requests of one client: about a third of what the machine decodes alone, so that half of
# the machine suffices beside training and gaps are those of steps, not of a queue that grows


def spec_of(model: str, folder: Path, cache: str | None) -> WorkerSpec:
    return WorkerSpec(
        job_id="bench",
        model=model,
        model_names=["bench"],
        settings=Reinforcement(batch_size=8).model_dump(),
        socket=str(folder / "socket"),
        folder=str(folder / "job"),
        cache_folder=cache,
        warm_up=128,
    )


def measure_http(model: str, folder: Path, cache: str | None) -> dict[str, Any]:
    spec = spec_of(model, folder, cache)
    (folder / "job").mkdir()
    (folder / "spec.json").write_text(spec.model_dump_json())
    command = [sys.executable, "-m", "upweight.server.worker", str(folder / "spec.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
        try:
            return asyncio.run(_measure(spec.socket, psutil.Process(worker.pid)))
        finally:
            worker.kill()


async def _measure(socket: str, worker: psutil.Process) -> dict[str, Any]:
    transport = httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=256))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=600) as client:
        await _until_ready(client)
        await _train_once(client)
        programs = await _programs(client)
        idle = await _load(client, every=EVERY)
        idle |= await _engine_steps(client)
        memory = await _memory_over_requests(client, worker, 2000)
        compiled = await _programs(client) - programs
        stop = asyncio.Event()
        training = asyncio.create_task(_train(client, stop))
        busy = await _load(client, every=EVERY)
        stop.set()
        steps = await training
    quiet, beside = idle["between_tokens_ms"], busy["between_tokens_ms"]
    return {
        "idle": idle | {"longest_gap_in_median_steps": quiet["max"] / quiet["p50"], "new_programs": compiled},
        "beside_training": busy | {"training_steps": steps},
        "between_tokens_times_idle": {name: beside[name] / quiet[name] for name in ("p50", "p99")},
        "resident_gb_over_2000_requests": memory,
    }


async def _programs(client: httpx.AsyncClient) -> int:
    return int((await client.get("/state")).json()["stats"]["programs"])


async def _engine_steps(client: httpx.AsyncClient) -> dict[str, Any]:
    """The engine's own clock: steps in which rows decoded, without and with prefill, and the latter in steps without of as many rows."""
    stats = (await client.get("/stats")).json()
    return {"engine_step_ms": stats["step_ms"], "prefill_steps_in_steps": stats["prefill_steps_in_steps"]}


async def _until_ready(client: httpx.AsyncClient) -> None:
    while True:
        try:
            if (await client.get("/state")).json()["phase"] == "ready":
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.5)


async def _load(client: httpx.AsyncClient, every: float) -> dict[str, Any]:
    first: list[float] = []
    gaps: list[float] = []

    async def one_client(number: int) -> None:
        draw = random.Random(number)
        asked = []
        for _ in range(PER_CLIENT):
            await asyncio.sleep(draw.expovariate(1 / every))
            asked.append(asyncio.create_task(_ask(client, draw.randrange(10**9), first, gaps)))  # open loop: none waits
        await asyncio.gather(*asked)

    began = time.perf_counter()
    await asyncio.gather(*(one_client(number) for number in range(CLIENTS)))
    seconds = time.perf_counter() - began
    return {
        "requests": CLIENTS * PER_CLIENT,
        "tokens_per_s": CLIENTS * PER_CLIENT * TOKENS / seconds,
        "first_token_ms": _spread(first),
        "between_tokens_ms": _spread(gaps),
    }


async def _ask(client: httpx.AsyncClient, seed: int, first: list[float], gaps: list[float]) -> None:
    draw = random.Random(seed)
    body = {
        "prompt": [draw.randrange(100, 40000) for _ in range(64)],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    last = began = time.perf_counter()
    pieces = 0
    async with client.stream("POST", "/openai/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {") or '"finish_reason": null' not in line:
                continue
            now = time.perf_counter()
            if pieces == 0:
                first.append(now - began)
            else:
                gaps.append(now - last)
            pieces, last = pieces + 1, now


async def _train_once(client: httpx.AsyncClient) -> None:
    """Compiles the training step and hands weights over for the first time."""
    answer = await client.post("/train?batch_index=0", content=encode_batch(_batch(0)))
    answer.raise_for_status()


async def _train(client: httpx.AsyncClient, stop: asyncio.Event) -> int:
    steps = 1
    while not stop.is_set():
        answer = await client.post(f"/train?batch_index={steps}", content=encode_batch(_batch(steps)))
        answer.raise_for_status()
        steps += 1
    return steps - 1


def _batch(seed: int) -> TrainBatch:
    """8 samples of 64 + 32 tokens."""
    draw = np.random.default_rng(seed)
    rows, prompt, answer = 8, 64, 32
    flat = rows * (prompt + answer)
    mask = np.tile(np.repeat([0, 1], [prompt, answer]), rows).astype(np.uint8)
    return TrainBatch(
        lengths=np.full(rows, prompt + answer, np.int32),
        token_ids=draw.integers(100, 40000, flat).astype(np.int32),
        logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
        mask=mask,
        reward=draw.standard_normal(rows).astype(np.float32),
        group=np.zeros(rows, np.int32),
        temperature=np.ones(flat, np.float32),
        raw_logprobs=np.full(flat, np.nan, np.float32),
        versions=np.where(mask, seed, -1).astype(np.int32),
        filtered=np.zeros(flat, np.uint8),
        matched=np.ones(rows, np.uint8),
    )


async def _memory_over_requests(client: httpx.AsyncClient, worker: psutil.Process, requests: int) -> dict[str, float]:
    """Resident gigabytes of the worker after each quarter of the requests."""
    found: dict[str, float] = {}
    places = asyncio.Semaphore(CLIENTS)

    async def short(seed: int) -> None:
        async with places:
            await _short(client, seed)

    for quarter in range(4):
        await asyncio.gather(*(short(quarter * requests + i) for i in range(requests // 4)))
        found[f"after {(quarter + 1) * requests // 4}"] = worker.memory_info().rss / 1e9
    return found


async def _short(client: httpx.AsyncClient, seed: int) -> None:
    body = {"prompt": [100 + seed % 30000, 7, 9], "max_tokens": 4, "ignore_eos": True, "seed": seed}
    (await client.post("/openai/v1/completions", json=body)).raise_for_status()


def _spread(values: list[float]) -> dict[str, float]:
    at = np.percentile(np.array(values) * 1e3, [50, 99, 100])
    return {"p50": float(at[0]), "p99": float(at[1]), "max": float(at[2])}
