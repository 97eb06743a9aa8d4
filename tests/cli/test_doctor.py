import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from upweight.cli import checks
from upweight.cli.checks import Check
from upweight.cli.doctor import lines, run_doctor


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPWEIGHT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_this_environment_is_sound(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert run_doctor(as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in report["checks"]}
    assert report["ok"] is True
    assert list(found) == [
        *("python", "packages core", "packages local", "cpu", "memory", "disk", "home", "model", "server", "jax"),
    ]
    assert "httpx 0." in found["packages core"]["detail"]
    assert "tokenizers 0." in found["packages local"]["detail"]
    assert "SmolLM2-135M-Instruct" in found["model"]["detail"]
    assert ": " in found["jax"]["detail"]
    assert found["server"]["status"] == "missing"
    assert found["server"]["next_step"] == "upweight serve"
    assert not home.exists(), "a check changes nothing"


def test_a_running_server(home: Path, url: str) -> None:
    home.mkdir()
    (home / "server.json").write_text(json.dumps({"url": url, "pid": os.getpid()}))
    found = checks.server()
    assert (found.ok, found.detail) == (True, f"{url}, process {os.getpid()}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"url": "http://127.0.0.1:9", "pid": 1}', "process 1"),
        ('{"url": "nonsense", "pid": 1}', "nonsense"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"url": "x"}', "damaged"),
    ],
)
def test_a_server_that_does_not_answer(home: Path, text: str, problem: str) -> None:
    home.mkdir()
    (home / "server.json").write_text(text)
    found = checks.server()
    assert not found.ok
    assert not found.needed
    assert problem in found.detail
    assert found.next_step.endswith("upweight serve")


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPWEIGHT_HOME", "/proc/nothing")
    found = checks.home_writable()
    assert not found.ok
    assert "/proc" in found.next_step


def test_jax_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_JAX_SCRIPT", "raise SystemExit('no driver')")
    found = checks.jax_devices()
    assert (found.ok, found.detail) == (False, "no driver")
    monkeypatch.setattr(checks, "_JAX_SCRIPT", "import time; time.sleep(30)")
    monkeypatch.setattr(checks, "_JAX_SECONDS", 0.2)
    assert checks.jax_devices().detail == "no answer within 0.2 s"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_declared", lambda extra: ["httpx", "no-such-package"])
    found = checks.packages("local")
    assert (found.ok, found.detail) == (False, "without no-such-package")
    assert found.next_step == "pip install 'upweight[local]'"


def test_lines_are_aligned() -> None:
    found = [Check("cpu", True, "2 cores"), Check("server", False, "none", "upweight serve")]
    assert lines(found) == [
        "ok       cpu     2 cores",
        "missing  server  none",
        "                 next: upweight serve",
    ]
