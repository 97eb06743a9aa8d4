import resource
import subprocess
import sys

import pytest

from upweight import __version__
from upweight.cli import main as entry
from upweight.cli.main import app
from upweight.errors import ConfigError, ModelNotFound, RequestError

HEAVY = {"jax", "openai", "fastapi", "numpy", "flax", "tokenizers"}


def run_python(script: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


COMMANDS = ["", "serve", "jobs", "jobs create", "jobs list", "jobs show", "jobs watch", "jobs cancel", "chat", "demo"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_quick_and_light(command: str) -> None:
    script = f"""
import atexit, sys
from upweight.cli import main
atexit.register(lambda: print("modules:", *sys.modules))
sys.argv = ["upweight", *{command.split()}, "--help"]
main()
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_python(script)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2  # CPU seconds; measured: 0.3
    assert done.returncode == 0
    usage, _, modules = done.stdout.partition("modules:")
    assert usage.startswith(f"Usage: upweight {command}".rstrip())
    assert "upweight.cli.main" in modules.split()
    assert not HEAVY & set(modules.split())


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["upweight", "--version"])
    with pytest.raises(SystemExit) as ended:
        entry()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Makes the command `fail` raise what is put into the list."""
    errors: list[Exception] = []

    def fail() -> None:
        raise errors[0]

    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))
    app.command("fail")(fail)
    monkeypatch.setattr(sys, "argv", ["upweight", "fail"])
    monkeypatch.delenv("UPWEIGHT_TRACEBACK", raising=False)
    return errors


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ModelNotFound("no model\nat x"), "error: no model at x\n"),
        (ConfigError("lr is -1"), "error: lr is -1\n"),
        (RequestError("messages: empty", field="messages"), "error: messages: empty\n"),
        (
            ModuleNotFoundError("No module named 'jax.numpy'", name="jax.numpy"),
            "error: jax.numpy is not installed: pip install 'upweight[local]'\n",
        ),
    ],
)
def test_our_errors_are_one_line(
    failing: list[Exception], error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(error)
    with pytest.raises(SystemExit) as ended:
        entry()
    assert ended.value.code == 1
    assert capsys.readouterr() == ("", line)


def test_bugs_keep_their_traceback(failing: list[Exception]) -> None:
    failing.append(KeyError("x"))
    with pytest.raises(KeyError):
        entry()
    failing[0] = ModuleNotFoundError("No module named 'upweight.nothing'", name="upweight.nothing")
    with pytest.raises(ModuleNotFoundError):
        entry()


def test_traceback_on_request(failing: list[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPWEIGHT_TRACEBACK", "1")
    failing.append(ConfigError("lr is -1"))
    with pytest.raises(ConfigError):
        entry()


@pytest.mark.parametrize("arguments", [["--nonsense"], ["nonsense"], ["doctor", "--nonsense"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    script = f"import sys; sys.argv = ['upweight', *{arguments}]; from upweight.cli import main; main()"
    done = run_python(script)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr
