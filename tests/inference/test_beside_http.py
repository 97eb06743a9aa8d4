"""Library calls from threads and asyncio, and HTTP requests, all on one engine at once: greedy answers stay what they are."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from upweight.inference import InferenceScheduler
from upweight.inference.library import InferenceEngine
from upweight.server.worker.app import make_app
from upweight.server.worker.core import WorkerCore
from upweight.server.worker_protocol import WorkerMode, WorkerSpec

GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
PROMPTS = [[7 + i, 20, 300 + i, 5] for i in range(8)]


@pytest.fixture(scope="module")
def core(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerCore]:
    folder = tmp_path_factory.mktemp("served")
    spec = WorkerSpec(
        job_id="j",
        mode=WorkerMode.SERVE,
        model=str(tiny_model_folder),
        model_names=["tiny"],
        socket=str(folder / "s"),
        folder=str(folder),
        max_slots=8,
        warm_up=64,
    )
    served = WorkerCore(spec)
    served.start()
    served.wait_ready()
    yield served
    served.engine.stop()


@contextlib.contextmanager
def http_server(core: WorkerCore) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(make_app(core), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/openai/v1/completions"
    server.should_exit = True
    thread.join(20)


def test_a_worker_that_was_warmed_up_meets_no_new_program(core: WorkerCore) -> None:
    ready = core.engine.stats()["programs"]
    scheduler = InferenceScheduler.on_engine(core.engine)
    for prompts in (PROMPTS[:1], PROMPTS, [list(range(3, 40))]):
        scheduler.run_batch(prompts, **GREEDY)
        scheduler.run_batch(prompts, max_tokens=4, top_p=0.9, frequency_penalty=0.5)
    assert core.engine.stats()["programs"] == ready > 10


def test_greedy_answers_of_a_busy_engine_are_those_of_a_quiet_one(core: WorkerCore) -> None:
    scheduler = InferenceScheduler.on_engine(core.engine)
    expected = [scheduler.run_batch([prompt], **GREEDY)[0] for prompt in PROMPTS]
    texts = [core.model.tokenizer.decode(ids) for ids in expected]
    library = InferenceEngine.on_scheduler(scheduler)

    def over_http(url: str, index: int) -> str:
        body = {"prompt": PROMPTS[index], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def sampled(seed: int) -> None:
        scheduler.run_batch(PROMPTS[:3], max_tokens=24, temperature=1.0, top_p=0.9, seed=[seed] * 3, ignore_eos=True)

    async def streamed() -> list[str]:
        async def one(prompt: list[int]) -> str:
            return "".join([piece async for piece in library.generate_async(prompt, **GREEDY)])

        return await asyncio.gather(*map(one, PROMPTS))

    with http_server(core) as url, ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(over_http, url, index) for index in range(8)]
        noise = [pool.submit(sampled, seed) for seed in range(3)]
        batches = [pool.submit(scheduler.run_batch, PROMPTS, **GREEDY) for _ in range(2)]
        streams = pool.submit(asyncio.run, streamed())
        assert [future.result(60) for future in asked] == texts
        assert [future.result(60) for future in batches] == [expected] * 2
        assert streams.result(60) == texts
        for future in noise:
            future.result(60)
    assert core.engine.alive
