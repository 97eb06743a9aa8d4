"""What the spool's folder may hold: samples that the server refuses, files of others, and a lock that the system does not know."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import Fault, Reply
from upweight.errors import RolloutError
from upweight.rollout import UploadFailed
from upweight.rollout.models import SampleGroup

from . import helpers

SETTINGS = {"num_samples_per_task": 2, "allowed_staleness": None, "num_batches": 2}


def numbered(task: int, context: Any) -> SampleGroup:
    return SampleGroup(samples=[helpers.good_sample(metadata={"task": str(task)}) for _ in range(2)])


def leave_samples(server: Any, make_runner: Any, folder: Path) -> list[Path]:
    server.faults.append(Fault("/samples", Reply(500, {}), times=10**6))
    with pytest.raises(UploadFailed):
        make_runner(numbered, spool_dir=folder, upload_timeout=0.1, **SETTINGS).run()
    server.faults.clear()
    return sorted(folder.glob("**/*.jsonl"))


def refuse(server: Any, tasks: set[str], reply: Reply) -> None:
    """Uploads with a sample of these tasks are refused as a whole."""
    answer = server.answer

    def refusing(request: Any) -> Reply:
        samples = request.body["samples"] if request.path.endswith("/samples") else []
        return reply if tasks & {sample["metadata"].get("task") for sample in samples} else answer(request)

    server.answer = refusing


@pytest.mark.parametrize("reply", [Reply(422, {"detail": "bad sample 7"}), Reply(413, {"detail": "bad sample 7"})])
def test_refused_samples_are_put_aside_and_the_run_goes_on(
    server: Any, make_runner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, reply: Reply
) -> None:
    """Failure X10: what no server will ever take does not block every later run."""
    files = leave_samples(server, make_runner, tmp_path)
    assert len(files) >= 3
    refuse(server, {"1", "2"}, reply)
    fresh = helpers.Counting()
    fresh.sample(100)
    runner = make_runner(numbered, fresh, spool_dir=tmp_path, **SETTINGS)
    summary = runner.run()
    assert server.sizes() == {0: 4, 1: 4}
    assert (summary.resumed_samples, summary.refused_samples, summary.unsent_samples) == (2 * len(files), 4, 0)
    aside = sorted(tmp_path.glob("**/*.refused"))
    assert [file.read_bytes().count(b"\n") for file in aside] == [2, 2]
    assert all(b'"task":"1"' in f.read_bytes() or b'"task":"2"' in f.read_bytes() for f in aside)
    assert not list(tmp_path.glob("**/*.jsonl"))
    told = [r.getMessage() for r in caplog.records if "refuses" in r.getMessage()]
    assert len(told) == 1
    assert "bad sample 7" in told[0]
    assert str(aside[0]) in told[0]
    assert "4 were refused; 4 lost, 0 doubled" in caplog.text
    assert runner.run().resumed_samples == 0


def test_strange_files_are_named_and_left_alone(
    server: Any, make_runner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = leave_samples(server, make_runner, tmp_path)
    folder = files[0].parent
    strange = {
        "notes.jsonl": b"remember the milk",
        "1-2.jsonl": b"{}",
        "a-b-c.jsonl": b"{}",
        "000000000090-7-broken.jsonl": b'{"id": "cut',
        "000000000091-7-empty.jsonl": b"",
        "000000000092-7-other.jsonl": b'{"id": "x"}\n',
        "000000000093-7-binary.jsonl": b"\xff\xfe\x00",
    }
    for name, content in strange.items():
        (folder / name).write_bytes(content)
    (folder / "000000000094-7-folder.jsonl").mkdir()
    summary = make_runner(numbered, spool_dir=tmp_path, **SETTINGS).run()
    assert (summary.batches_filled, summary.resumed_samples) == (2, 2 * len(files))
    lines = [r.getMessage() for r in caplog.records if "left alone" in r.getMessage()]
    assert len(lines) == len(strange) + 1
    assert all(sum(str(folder / name) in line for line in lines) == 1 for name in strange)
    assert not any("\n" in line for line in lines)
    assert {name: (folder / name).read_bytes() for name in strange} == strange


def test_a_file_system_without_locks_ends_no_run(
    server: Any, make_runner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert make_runner(spool_dir=tmp_path).run().batches_filled == 3
    assert "No locks available" in caplog.text


def test_a_spool_that_cannot_be_made_is_one_clear_line(make_runner: Any, tmp_path: Path) -> None:
    (tmp_path / "job-1").write_text("a file where the folder of the job belongs")
    with pytest.raises(RolloutError, match=r"spool_dir: .*job-1 cannot be used: .*exists"):
        make_runner(spool_dir=tmp_path).run()
