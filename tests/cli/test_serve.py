import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Command
from upweight.cli.serve import next_steps
from upweight.server.process import Ready, is_loopback


def test_the_first_start_says_address_home_key_and_next_steps(server_home: Path) -> None:
    end = time.monotonic() + 10
    while "stop:" not in (printed := (server_home / "printed").read_text()):
        assert time.monotonic() < end, printed
        time.sleep(0.05)
    lines = printed.splitlines()
    key = (server_home / "api_key").read_text().strip()
    assert lines[0].startswith("upweight server: http://127.0.0.1:")
    assert lines[0].endswith(f"home {server_home}")
    assert key in lines[1]
    assert f"UPWEIGHT_HOME={server_home} upweight jobs create --model SmolLM2-135M-Instruct" in lines[3]


def test_ctrl_c_stops_it_in_order_and_an_open_address_is_warned_of(tmp_path: Path) -> None:
    arguments = ["serve", "--home", str(tmp_path), "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 30
    while not (tmp_path / "server.json").exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert errors.startswith("warning: 0.0.0.0 may be reached from other machines")
    assert errors.count("\n") == 1


def test_a_second_server_and_wrong_settings_are_one_line(upweight: Command, in_server_home: Path) -> None:
    done = upweight("serve", "--port", "0")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.err.startswith("error: the store in ")
    done = upweight("serve", "--max-running", "0")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "max_running = 0" in done.err


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['uvicorn'] = None; from upweight.cli import main; main()"
    done = subprocess.run(
        [COMMAND[0], "-c", script, "serve", "--home", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "error: uvicorn is not installed: pip install 'upweight[local]'\n")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_home_folder_is_named_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UPWEIGHT_HOME", raising=False)
    usual, other = Path("~/.upweight").expanduser(), Path("/a b")
    assert "UPWEIGHT_HOME" not in "".join(next_steps(Ready("http://h:1", usual, usual / "api_key", None)))
    lines = next_steps(Ready("http://h:1", other, other / "api_key", "secret"))
    assert "UPWEIGHT_HOME='/a b' upweight jobs list" in "".join(lines)
    assert lines[0] == "  watch jobs:    http://h:1/ (the page asks for the key in /a b/api_key)"
