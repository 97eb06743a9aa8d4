"""The server's log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from upweight.server.log_lines import LogFile


def test_a_log_on_a_full_disk_is_one_line_and_not_one_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogFile(Path("/dev/full"), "text")
    for _ in range(3):
        log.handle(logging.LogRecord("upweight.server", logging.ERROR, "", 0, "the disk is full", (), None))
    assert capsys.readouterr().err == "upweight server: /dev/full cannot be written: No space left on device\n"
    with pytest.raises(OSError, match="No space left"):  # what it holds cannot be written at its end either
        log.close()


def test_a_record_that_cannot_be_formatted_is_a_bug_and_told_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = LogFile(tmp_path / "log", "text")
    log.handle(logging.LogRecord("upweight.server", logging.ERROR, "", 0, "%d", ("x",), None))
    log.close()
    assert "Traceback" in capsys.readouterr().err
