"""`upweight chat`: saved weights in this process, a job's endpoint, and the conversation on a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import COMMAND, Command
from upweight.cli.chat import converse, show
from upweight.cli.chat_voices import Answer, Message, Sampling, _events, _take
from upweight.errors import EngineError, ServerError

SAMPLING = Sampling(temperature=0.0, max_tokens=6)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPWEIGHT_HOME", str(tmp_path))
    return tmp_path


def test_saved_weights_answer_alone_on_standard_output(upweight: Command, home: Path, tiny_model_folder: Path) -> None:
    arguments = ("chat", str(tiny_model_folder), "--prompt", "hi", "--temperature", "0", "--max-tokens", "5")
    done = upweight(*arguments, "--json")
    answer = done.json()
    assert (answer["finish_reason"], answer["tokens"], answer["version"]) == ("length", 5, None)
    assert answer["model"] == "tiny"
    assert done.err == "loading… tiny\n"
    assert upweight(*arguments).out == answer["text"] + "\n"
    assert (home / "cache" / "compiled").is_dir()


def test_a_prompt_that_does_not_fit_is_one_line(upweight: Command, home: Path, tiny_model_folder: Path) -> None:
    done = upweight("chat", str(tiny_model_folder), "--prompt", "word " * 600)
    assert (done.code, done.out.strip()) == (1, "")
    assert done.err.splitlines()[-1].startswith("error: the prompt has ")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["no-such-model", "--prompt", "x"], 1, "error: model 'no-such-model' is not known"),
        (["ftjob-0", "--prompt", "x"], 1, "start one with: upweight serve"),
        (["smollm2", "--json"], 2, "--json: it needs --prompt"),
        (["smollm2", "--max-tokens", "0", "--prompt", "x"], 2, "--max-tokens"),
    ],
)
def test_wrong_use_is_told_at_once(upweight: Command, home: Path, arguments: list[str], code: int, told: str) -> None:
    done = upweight("chat", *arguments)
    assert done.code == code
    assert told in done.err
    assert done.out == ""


def test_a_job_that_is_over_answers_from_its_last_version(
    upweight: Command,
    in_server_home: Path,
    trained_job: dict[str, Any],
) -> None:
    arguments = ("chat", trained_job["id"], "--prompt", "hi", "--temperature", "0", "--max-tokens", "5")
    answer = upweight(*arguments, "--json").json()
    assert (answer["model"], answer["version"], answer["tokens"]) == (trained_job["id"], 2, 5)
    assert upweight(*arguments).out == answer["text"] + "\n"
    weights = in_server_home / "jobs" / trained_job["id"] / "weights"
    saved = upweight("chat", str(weights), *arguments[2:], "--json").json()
    assert saved["text"] == answer["text"], "the weights on the disk are those that are served"


def test_standard_input_is_the_prompt_without_a_terminal(home: Path, tiny_model_folder: Path) -> None:
    command = [*COMMAND, "chat", str(tiny_model_folder), "--max-tokens", "3"]
    done = subprocess.run(command, input="hi\n", capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n")
    assert done.stderr == "loading… tiny\n"
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("error: there is nothing to answer")) == (1, True)


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.handle, inner = pty.openpty()
        # A session of its own, whose terminal this is: only so does Ctrl-C become a signal.
        script = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from upweight.cli import main; main()"
        self.process = subprocess.Popen(
            [COMMAND[0], "-c", script, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(inner)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 40) -> None:
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.handle], [], [], 0.2)[0]:
                self.seen += os.read(self.handle, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.handle, text.encode())

    def end(self) -> int:
        """The exit code, once all was read that it printed."""
        try:
            while piece := os.read(self.handle, 4096):
                self.seen += piece.decode(errors="replace")
        except OSError:
            pass  # how Linux tells that nobody holds the other end any more
        os.close(self.handle)
        return self.process.wait(20)


def test_ctrl_c_ends_a_conversation_without_a_traceback(home: Path, tiny_model_folder: Path) -> None:
    terminal = Terminal("chat", str(tiny_model_folder), "--max-tokens", "450")
    terminal.wait_for("> ")
    terminal.type("hi\n")
    terminal.wait_for("hi\r\n")
    time.sleep(0.3)  # in the middle of the first step or of an answer
    terminal.type("\x03")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.seen


def test_an_empty_line_ends_a_conversation(home: Path, tiny_model_folder: Path) -> None:
    terminal = Terminal("chat", str(tiny_model_folder), "--max-tokens", "3")
    terminal.wait_for("> ")
    terminal.type("hi\n")
    terminal.wait_for("> ")
    terminal.type("\n")
    assert terminal.end() == 0


class Echo:
    """Says how many messages it was given, and fails when told to."""

    name = "echo"

    def say(self, messages: Sequence[Message], sampling: Sampling, answer: Answer) -> Iterator[str]:
        if messages[-1]["content"] == "fail":
            raise EngineError("it failed")
        yield from ("heard ", str(len(messages)))
        answer.text = f"heard {len(messages)}"


def test_a_conversation_keeps_its_history(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    questions = iter(["a", "b", "fail", "c", "/reset", "d", "", "never asked"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(questions))
    converse(Echo(), [{"role": "system", "content": "s"}], SAMPLING)
    told = capsys.readouterr()
    # system + question, then two more a turn; a question that failed is forgotten
    assert told.out.split("\n\n") == ["heard 2", "heard 4", "\nheard 6", "heard 2", ""]
    assert "error: it failed (/reset begins anew)" in told.err
    assert next(questions) == "never asked"


def test_control_characters_reach_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show(["a\x1b[2J", "b\tc\n\x07"])
    assert capsys.readouterr().out == "a\x1b[2Jb\tc\n\x07\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(["a\x1b[2J", "b\tc\n\x07"])
    assert capsys.readouterr().out == "a[2Jb\tc\n\n"


def test_a_stream_that_breaks_off_is_an_error() -> None:
    assert list(_events(iter(['data: {"a": 1}', "", "data: [DONE]"]))) == [{"a": 1}]
    with pytest.raises(ServerError, match="broke off before its end"):
        list(_events(iter(['data: {"a": 1}'])))
    with pytest.raises(ServerError, match="broke off: out of memory"):
        _take({"error": {"message": "out of memory"}}, Answer())
