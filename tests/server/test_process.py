"""The server as a process: start, signals, kill -9, second servers, imports."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_harness import KEY, sample

from upweight.errors import ServerError
from upweight.server.home import Home, find_server

SERVE = Path(__file__).with_name("serve_fake.py")
Serve = Callable[..., subprocess.Popen]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    processes: list[subprocess.Popen] = []
    (tmp_path / "model").mkdir()

    def begin(*settings: str, wait: bool = True, home: Path = tmp_path / "home") -> subprocess.Popen:
        (home / "server.json").unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, str(SERVE), str(home), *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        end = time.monotonic() + 30
        while wait and not (home / "server.json").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def client(home: Path) -> httpx.Client:
    url = json.loads((home / "server.json").read_text())["url"]
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=20)


def create_job(http: httpx.Client, model: Path, **settings: Any) -> str:
    method = {"type": "reinforcement", "reinforcement": settings}
    answer = http.post("/v1/fine_tuning/jobs", json={"model": str(model), "method": method})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def wait_for(http: httpx.Client, job: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    end = time.monotonic() + 20
    while not condition(progress := http.get(f"/v1alpha1/fine_tuning/jobs/{job}/progress").json()):
        assert time.monotonic() < end, progress
        time.sleep(0.05)
    return progress


def wait_for_version(http: httpx.Client, job: str, version: int) -> dict[str, Any]:
    return wait_for(http, job, lambda p: p["inference_version"] == version and p["worker"])


def test_kill_9_in_the_middle_of_uploads_keeps_all_that_was_acknowledged(serve: Serve, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = serve()
    with client(home) as http:
        job = create_job(http, tmp_path / "model", batch_size=100_000, num_batches=1)
        http.post(f"/v1alpha1/fine_tuning/jobs/{job}/batches", json={"index": 0})
    acknowledged: list[str] = []

    def send(worker: int) -> None:
        with client(home) as mine:
            for number in range(100_000):
                id = f"{worker}-{number}"
                try:
                    answer = mine.post(
                        f"/v1alpha1/fine_tuning/jobs/{job}/batches/0/samples", json={"samples": [sample(id)]}
                    )
                except httpx.TransportError:
                    return
                assert answer.status_code == 200
                acknowledged.append(id)

    threads = [threading.Thread(target=send, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 30
    while len(acknowledged) <= 20 and time.monotonic() < end:
        time.sleep(0.05)
    first.kill()
    for thread in threads:
        thread.join(10)
    assert len(acknowledged) > 20

    serve()
    with client(home) as http:
        before = http.get(f"/v1alpha1/fine_tuning/jobs/{job}/batches/0").json()["sample_count"]
        # each thread may have had one more on its way
        assert len(acknowledged) <= before <= len(acknowledged) + 4
        again = {"samples": [sample(id) for id in acknowledged]}
        answer = http.post(f"/v1alpha1/fine_tuning/jobs/{job}/batches/0/samples", json=again)
        assert answer.json()["sample_count"] == before  # all of them were there


def test_workers_die_with_a_killed_server_and_the_next_one_goes_on(serve: Serve, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = serve()
    with client(home) as http:
        job = create_job(http, tmp_path / "model", batch_size=1, num_batches=2)
        http.post(f"/v1alpha1/fine_tuning/jobs/{job}/batches", json={"index": 0})
        http.post(f"/v1alpha1/fine_tuning/jobs/{job}/batches/0/samples", json={"samples": [sample("a")]})
        known = wait_for_version(http, job, 1)
    first.kill()
    gone = psutil.Process(known["worker"]["pid"]) if psutil.pid_exists(known["worker"]["pid"]) else None
    if gone is not None:
        gone.wait(5)
    second = serve('behaviour={"train_seconds": 1.0}')
    with client(home) as http:
        progress = wait_for_version(http, job, 1)
        assert progress["versions"] == known["versions"]
        http.post(f"/v1alpha1/fine_tuning/jobs/{job}/batches", json={"index": 1})
        http.post(f"/v1alpha1/fine_tuning/jobs/{job}/batches/1/samples", json={"samples": [sample("b")]})
        wait_for(http, job, lambda p: p["reason"] == "trains batch 1")
    second.kill()  # in the middle of batch 1
    serve()
    with client(home) as http:
        progress = wait_for(http, job, lambda p: p["job_status"] == "succeeded")
        assert progress["versions"][:2] == known["versions"]
        assert (progress["ledger"]["accepted"], progress["ledger"]["trained"]) == (2, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_server_and_stubborn_workers_in_time(serve: Serve, tmp_path: Path, number: int) -> None:
    process = serve('behaviour={"ignore_sigterm": true}', "worker_stop_timeout=2")
    with client(tmp_path / "home") as http:
        job = create_job(http, tmp_path / "model", batch_size=1)
        worker = psutil.Process(wait_for_version(http, job, 0)["worker"]["pid"])
        started = time.monotonic()
        process.send_signal(number)
        output, errors = process.communicate(timeout=10)
    assert time.monotonic() - started < 4
    assert process.returncode == 0, errors
    assert not worker.is_running()
    assert "False" in output  # no JAX in the API process, after all it did
    assert not (tmp_path / "home" / "server.json").exists()


def test_the_end_of_the_parents_pipe_stops_the_server(serve: Serve) -> None:
    process = serve("parent_pipe=true")
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(5) == 0


def test_a_second_server_on_the_same_home_is_told_so(serve: Serve, tmp_path: Path) -> None:
    first = serve()
    told = (tmp_path / "home" / "server.json").read_text()
    second = subprocess.run(
        [sys.executable, str(SERVE), str(tmp_path / "home")], capture_output=True, text=True, timeout=20
    )
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert f"in use by another server (process {first.pid}" in second.stderr
    assert (tmp_path / "home" / "server.json").read_text() == told


def test_of_servers_that_start_together_on_one_home_one_goes_on_and_each_other_says_so(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = [sys.executable, str(SERVE), str(home)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        end = time.monotonic() + 20
        while len(over := [one for one in processes if one.poll() is not None]) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        for one in over:
            errors = one.communicate()[1]
            assert (one.returncode, errors.count("\n"), "in use by another server" in errors) == (1, 1, True)
    finally:
        for one in processes:
            one.terminate()
            one.communicate(timeout=20)


def test_a_store_that_takes_nothing_at_the_start_is_one_line(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from upweight.errors import StoreError\n"
        "from upweight.server import load_settings, run\n"
        "from upweight.server.store import keys\n"
        "def full(*_):\n"
        "    raise StoreError('the store did not commit: database or disk is full')\n"
        "keys.add_key = full\n"
        "try:\n"
        "    run(load_settings(home=Path(sys.argv[1]), port=0))\n"
        "except StoreError as error:\n"
        "    print('error:', error, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert done.stderr == "error: the store did not commit: database or disk is full\n"


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_key_file_that_is_none_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "api_key"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(ServerError, match=r"cannot be read .*; mend it, or delete it and a new one is made"):
        Home(tmp_path).api_key()


def test_a_signal_asks_for_the_stacks_of_all_threads(serve: Serve, tmp_path: Path) -> None:
    """Report H11: a look inside without a debugger."""
    process = serve()
    process.send_signal(signal.SIGUSR1)
    url = json.loads((tmp_path / "home" / "server.json").read_text())["url"]
    assert httpx.get(f"{url}/healthz").status_code == 200
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Current thread" in errors
    assert "database.py" in errors


def test_a_taken_port_is_one_line_with_the_remedy(serve: Serve) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = serve(f"port={port}", wait=False)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert f"port {port} is taken" in errors
    assert "--port" in errors


def test_a_home_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "upweight.server", "--home", str(tmp_path / "file"), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "is not writable" in done.stderr
    assert "--home" in done.stderr


def test_the_first_start_makes_a_key_prints_it_once_and_guards_its_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    printed = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "upweight.server", "--home", str(home), "--port", "0", "--parent-pipe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "UPWEIGHT_PORT": ""},
        )
        end = time.monotonic() + 20
        while not (home / "server.json").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        output, _ = process.communicate(timeout=10)  # closes its input
        printed.append(output)
    key = (home / "api_key").read_text().strip()
    assert (key in printed[0], key in printed[1]) == (True, False)
    assert stat.S_IMODE((home / "api_key").stat().st_mode) == 0o600


def test_a_client_on_this_machine_finds_the_running_server_only(serve: Serve, tmp_path: Path) -> None:
    process = serve()
    found = find_server(tmp_path / "home")
    assert found is not None
    assert (found.pid, found.api_key) == (process.pid, KEY)
    assert KEY not in repr(found)
    process.kill()
    process.wait()
    assert (tmp_path / "home" / "server.json").exists()
    assert find_server(tmp_path / "home") is None
    assert find_server(tmp_path / "nowhere") is None


def test_the_installed_resolver_of_models_imports_no_jax() -> None:
    pytest.importorskip("upweight.weights.source")
    code = (
        "import sys; from upweight.errors import ModelNotFound; from upweight.server.api.app import _resolve_installed\n"
        "try: _resolve_installed('no-such-model')\n"
        "except ModelNotFound: print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head(serve: Serve, tmp_path: Path) -> None:
    serve()
    with client(tmp_path / "home") as http:
        waits = []
        for _ in range(20):
            began = time.perf_counter()
            http.get("/v1/fine_tuning/jobs")
            waits.append(time.perf_counter() - began)
    assert min(waits) < 0.03  # 0.04 s is what a client may put off an acknowledgement


def test_importing_the_server_imports_no_jax() -> None:
    code = (
        "import sys, upweight.server; light = 'fastapi' not in sys.modules;"
        "from upweight.server import create_app, run, Settings; print(light, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_the_log_is_json_for_a_collector_if_asked(serve: Serve, tmp_path: Path) -> None:
    serve('log_format="json"')
    with client(tmp_path / "home") as http:
        job = create_job(http, tmp_path / "model", batch_size=2, num_batches=1)
        log, end = tmp_path / "home" / "logs" / "server.log", time.monotonic() + 20
        while not any(line.get("job") == job for line in map(json.loads, log.read_text().splitlines())):
            assert time.monotonic() < end
            time.sleep(0.05)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert KEY not in log.read_text()


def test_a_server_killed_in_a_promotion_serves_no_half_model(tmp_path: Path, serve: Serve) -> None:
    process = serve('behaviour={"half_exports": "hang"}')
    home = tmp_path / "home"
    with client(home) as http:
        job = create_job(http, tmp_path / "model", batch_size=1, num_batches=2, checkpoint_every=1)
        http.post(f"/v1alpha1/fine_tuning/jobs/{job}/batches", json={"index": 0})
        http.post(f"/v1alpha1/fine_tuning/jobs/{job}/batches/0/samples", json={"samples": [sample("a")]})
        wait_for(http, job, lambda p: p["inference_version"] == 1)
        promote = f"/v1/fine_tuning/jobs/{job}/checkpoints/ftckpt-{job}-1/promote"
        asking = threading.Thread(target=lambda: _broken_off(http, promote))
        asking.start()
        end = time.monotonic() + 10
        while not list((home / "models").rglob("model.safetensors")):
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        asking.join()
    serve()
    with client(home) as http:
        assert list((home / "models").iterdir()) == []
        wait_for(http, job, lambda p: p["inference_version"] == 1)
        assert http.post(promote).status_code == 200
        assert len(list((home / "models").iterdir())) == 1


def _broken_off(http: httpx.Client, path: str) -> None:
    with pytest.raises(httpx.TransportError):
        http.post(path)
