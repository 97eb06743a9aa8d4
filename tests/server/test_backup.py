"""A copy of a home folder, made while the server runs: a server on the copy goes on where the original stood."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from server_harness import Start, servers

from upweight.errors import StoreError
from upweight.server.backup import back_up


def test_a_server_on_the_copy_goes_on_and_ends_like_the_original(start: Start, tmp_path: Path) -> None:
    server = start()
    job = server.create_job(num_batches=3, checkpoint_every=1)
    for index in range(2):
        server.fill(job, index)
        server.wait(job, lambda p, index=index: p["inference_version"] == index + 1)
    there = tmp_path / "copies" / "home"
    made = back_up(server.home, there)
    assert (made.jobs, made.samples) == (1, 4)
    server.fill(job, 2)
    ended = server.wait_status(job, "succeeded")
    server.stop()

    (tmp_path / "other").mkdir()
    for path in (server.home / "jobs").iterdir():  # the copy needs nothing of the original
        path.rename(tmp_path / "other" / path.name)
    with servers(there.parent) as begin:
        copy = begin()
        assert copy.wait(job, lambda p: p["inference_version"] == 2)["ledger"]["accepted"] == 4
        assert not any("replay" in message for message in copy.events(job))  # its own checkpoint was found
        copy.fill(job, 2)
        assert copy.wait_status(job, "succeeded")["versions"][-1]["fingerprint"] == ended["versions"][-1]["fingerprint"]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store in"):
        back_up(tmp_path, tmp_path.parent / "copy")
    (tmp_path / "store.sqlite3").touch()
    (tmp_path / "taken").mkdir()
    with pytest.raises(StoreError, match="exists already"):
        back_up(tmp_path, tmp_path / "taken")
    with pytest.raises(StoreError, match="lies in the home folder itself"):
        back_up(tmp_path, tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store.sqlite3", "taken"]


def test_a_store_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "store.sqlite3").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="failed"):
        back_up(home, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_what_a_killed_backup_left_goes_with_the_next_one(start: Start, tmp_path: Path) -> None:
    server = start()
    copies = tmp_path / "copies"
    for process in (2**22 + 1, os.getpid()):  # no process has the first number
        (copies / f".home.{process}.partial").mkdir(parents=True)
    (copies / f".home.{os.getpid()}.partial").rename(copies / f".home.{os.getppid()}.partial")  # it still copies
    back_up(server.home, copies / "home")
    assert sorted(path.name for path in copies.iterdir()) == [f".home.{os.getppid()}.partial", "home"]


def test_a_home_that_became_read_only_is_copied_with_all_that_was_stored(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    job = server.create_job(batch_size=10)
    server.fill(job, 0, count=3)  # in SQLite's log, not yet in its file
    monkeypatch.setattr(os, "access", lambda *_: False)
    made = back_up(server.home, tmp_path / "copy")
    assert (made.jobs, made.samples) == (1, 3)
    assert sorted(path.name for path in (tmp_path / "copy").glob("store*")) == ["store.sqlite3"]
