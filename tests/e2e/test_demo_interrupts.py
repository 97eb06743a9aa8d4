"""Ctrl-C at any moment of `upweight demo`: it ends within 10 s, nothing is left running, and it can be resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from upweight.demo.record import load_record

# A tiny random model never earns a reward: all its groups are rejected and training waits for the first batch.
COMMAND = [sys.executable, "-m", "upweight.cli", "demo", "--seed", "1"]


STARTED: list[subprocess.Popen[str]] = []


def start(home: Path, *options: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "UPWEIGHT_HOME": str(home)}
    command = [*COMMAND, *options]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], said: str) -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if said in line:
            return text
    raise AssertionError(f"{said!r} was never printed:\n{text}")


@pytest.mark.parametrize("phase", ["measuring this machine", "loading the model", "scoring before", "training"])
def test_interrupt_ends_within_10_seconds_and_leaves_nothing(
    tmp_path: Path, tiny_model_folder: Path, phase: str
) -> None:
    options = ["--model", str(tiny_model_folder)]
    if phase != "measuring this machine":
        options += ["--steps", "2"]
    process = start(tmp_path, *options)
    read_until(process, phase)
    time.sleep(0.5)
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=15)
    assert time.monotonic() - began < 10
    assert process.returncode == 130
    assert "Traceback" not in output
    assert "upweight demo --resume" in output
    _, alive = psutil.wait_procs(children, timeout=3)
    assert alive == []


def test_resume_without_a_run_is_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, "--resume")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.strip().splitlines() == [
        f"error: there is no run to resume in {tmp_path}; start one without --resume"
    ]


def test_killed_demo_leaves_no_server_behind(tmp_path: Path, tiny_model_folder: Path) -> None:
    process = start(tmp_path, "--model", str(tiny_model_folder), "--steps", "2")
    read_until(process, "training")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2  # server and worker
    process.kill()
    process.communicate(timeout=10)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_a_second_demo_in_one_home_is_refused_and_disturbs_nothing(tmp_path: Path, tiny_model_folder: Path) -> None:
    first = start(tmp_path, "--model", str(tiny_model_folder), "--steps", "2")
    read_until(first, "loading the model")
    record = load_record(tmp_path)
    second = start(tmp_path, "--model", str(tiny_model_folder), "--steps", "7")
    output, _ = second.communicate(timeout=60)
    assert (second.returncode, output.strip()) == (
        1,
        f"error: another demo runs in {tmp_path}; wait for it, or set UPWEIGHT_HOME",
    )
    after = load_record(tmp_path)
    assert record is not None
    assert after is not None
    assert (after.run_id, after.options, after.batches) == (record.run_id, record.options, 2)
    first.kill()
    first.communicate(timeout=10)
    resumed = start(tmp_path, "--resume")  # at once: the server of the killed one is still ending
    read_until(resumed, "loading the model")
    resumed.kill()
    resumed.communicate(timeout=10)


def test_a_closed_output_and_one_that_is_not_utf8_are_no_reason_to_fail(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    odd = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, "UPWEIGHT_HOME": str(tmp_path), **odd}
    arguments = ["--model", str(tiny_model_folder), "--steps", "1"]
    process = subprocess.Popen(
        [*COMMAND, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    told = b""
    while b"loading the model" not in told:
        told += process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=15)
    assert process.returncode == 130
    assert b"Error" not in told + rest
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "--resume", "--model", "x"],
        env={**environment, "UPWEIGHT_HOME": str(tmp_path / "other")},
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert closed.stderr.decode().strip().startswith("error: there is no run to resume")
