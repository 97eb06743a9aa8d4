"""The process that reads large uploads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from upweight.errors import ServerError
from upweight.server.api.reading import UploadReader
from upweight.server.api.uploads import parse_upload
from upweight.server.refusals import Refusal


def body(count: int = 3, **changes: object) -> bytes:
    one = {
        "token_ids": [1, 2, 3],
        "logprobs": [0.0, -0.5, -0.25],
        "mask": [0, 1, 1],
        "normalized_reward": 0.5,
        "metadata": {"a": "b"},
        "debug_info": {"task_id": "t", "reward": 1},
    }
    return json.dumps({"samples": [one | {"id": f"s{i}"} | changes for i in range(count)]}).encode()


def test_it_reads_and_refuses_what_the_server_itself_would() -> None:
    async def run() -> None:
        reader = UploadReader()
        try:
            assert await reader.read(body(), True) == parse_upload(body(), True)
            for wrong in (body(mask=[0, 1, 2]), body(debug_info={}), b'{"samples": [', b"", body(id=7)):
                with pytest.raises(Refusal) as expected:
                    parse_upload(wrong, True)
                with pytest.raises(Refusal) as refused:
                    await reader.read(wrong, True)
                assert (refused.value.status, refused.value.detail) == (422, expected.value.detail)
        finally:
            await reader.close()

    asyncio.run(run())


def test_an_upload_outlives_the_process_that_reads_it_and_a_request_that_goes_away() -> None:
    async def run() -> None:
        reader = UploadReader()
        try:
            await reader.read(body(), True)
            (first,) = psutil.Process().children()
            first.suspend()
            reading = asyncio.create_task(reader.read(body(500), True))
            await asyncio.sleep(0.1)
            first.kill()
            assert len(await reading) == 500
            (second,) = (one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE)
            assert second.pid != first.pid
            second.suspend()
            abandoned = asyncio.create_task(reader.read(body(500), True))
            await asyncio.sleep(0.1)
            abandoned.cancel()
            with pytest.raises(asyncio.CancelledError):
                await abandoned
            assert await reader.read(body(1), False) == parse_upload(body(1), False)
        finally:
            await reader.close()

    asyncio.run(run())


def test_one_that_cannot_start_fails_its_upload_and_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    async def run() -> int:
        reader = UploadReader()
        before = psutil.Process().num_fds()
        with pytest.raises(ServerError, match="uploads"):
            await reader.read(body(), True)
        return psutil.Process().num_fds() - before

    assert asyncio.run(run()) == 0


def test_it_ends_when_its_server_is_killed() -> None:
    code = (
        "import asyncio, sys; from upweight.server.api.reading import UploadReader\n"
        "async def run():\n"
        "    reader = UploadReader()\n"
        "    await reader.read(sys.argv[1].encode(), True)\n"
        "    print(reader._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(run())\n"
    )
    server = subprocess.Popen([sys.executable, "-c", code, body().decode()], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout:
        child = int(server.stdout.readline())
    assert psutil.pid_exists(child)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    end = time.monotonic() + 20
    while psutil.pid_exists(child):
        assert time.monotonic() < end, "the reading process lives on"
        time.sleep(0.05)
