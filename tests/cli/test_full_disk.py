"""A folder that cannot be written is one line, whatever was being written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Command


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_closed_disk_is_one_line(
    upweight: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    monkeypatch.setenv("UPWEIGHT_HOME", str(tmp_path))

    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("upweight.demo.entry.run_demo", full)
    done = upweight("demo")
    assert done.code == 1
    reason = f"{tmp_path} cannot be written ({os.strerror(number)}): free or allow it, or set UPWEIGHT_HOME"
    assert done.err.strip() == f"error: {reason}"
