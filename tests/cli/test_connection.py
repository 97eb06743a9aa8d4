import json
import os
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from upweight.cli.connection import Place, find_place, session
from upweight.errors import ConfigError, ServerError, UpweightError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPWEIGHT_HOME", str(tmp_path))
    for name in ("TOKENFACTORY_BASE_URL", "TOKENFACTORY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def running(home: Path, url: str = "http://127.0.0.1:9") -> None:
    (home / "server.json").write_text(json.dumps({"url": url, "pid": os.getpid()}))
    (home / "api_key").write_text("home-key\n")


def test_the_running_server_is_found_in_the_home_folder(home: Path) -> None:
    running(home)
    files = {"url_from": str(home / "server.json"), "key_from": str(home / "api_key")}
    assert find_place(None, None) == Place(url="http://127.0.0.1:9", key="home-key", **files)
    assert find_place(None, None).key_file == str(home / "api_key")


def test_options_beat_the_environment_which_beats_the_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running(home)
    monkeypatch.setenv("TOKENFACTORY_BASE_URL", "https://env")
    monkeypatch.setenv("TOKENFACTORY_API_KEY", "env-key")
    told = find_place(None, None)
    assert (told.url, told.url_from, told.key) == ("https://env", "TOKENFACTORY_BASE_URL", "env-key")
    told = find_place("https://option/", "option-key")
    assert (told.url, told.url_from, told.key, told.key_file) == ("https://option", "--url", "option-key", None)


def test_the_key_of_the_home_folder_goes_to_no_other_server(home: Path) -> None:
    running(home)
    assert find_place("http://127.0.0.1:9/", None).key == "home-key"
    with pytest.raises(ConfigError, match="no API key for https://elsewhere: set TOKENFACTORY_API_KEY"):
        find_place("https://elsewhere", None)


def test_without_a_server_the_line_says_how_to_start_one(home: Path) -> None:
    with pytest.raises(ServerError, match=r"no server is running in .*: start one with: upweight serve"):
        find_place(None, None)
    (home / "server.json").write_text("{")
    with pytest.raises(ServerError, match=r"server.json cannot be used .*upweight serve"):
        find_place(None, None)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (None, "no server answers at http://127.0.0.1:9 .*upweight serve"),
        ("http://127.0.0.1:1", "no server answers at http://127.0.0.1:1, given by --url"),
        ("nonsense", "--url: .*'nonsense'"),
    ],
)
def test_a_server_that_does_not_answer(home: Path, url: str | None, told: str) -> None:
    running(home)
    with pytest.raises(UpweightError, match=told), session(url, "key") as (client, _):
        client.get(f"{client.base_url}/healthz")


def test_a_key_that_cannot_be_sent_is_told_with_its_own_source(home: Path) -> None:
    running(home)
    with pytest.raises(ConfigError, match=r"^--key: api_key cannot be sent"), session(None, "ключ"):
        pass


ANSWERS = [
    (b"[]", "an object is expected, it is list"),
    (b"{}", "missing"),
    (b'{"data": 3, "has_more": false}', "data is no list|missing"),
    (b'{"data": [{"id": 1}], "has_more": false}', "status, created_at, model missing|missing"),
]


@pytest.mark.parametrize(("body", "told"), ANSWERS)
def test_a_server_of_another_kind_is_one_line(upweight: Command, body: bytes, told: str) -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as url:
        for command in (["list"], ["show", "x"], ["watch", "x"], ["pause", "x"], ["promote", "ftckpt-x-1"]):
            done = upweight("jobs", *command, "--url", url, "--key", "k")
            assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
            assert re.search(told, done.err)
            assert done.err.endswith("is it an upweight server?\n")


def test_a_server_that_has_moved_says_where(upweight: Command) -> None:
    with answering(b"HTTP/1.1 302 Found\r\nLocation: https://new.example\r\nContent-Length: 0\r\n\r\n") as url:
        done = upweight("jobs", "list", "--url", url, "--key", "k")
    assert done.err == f"error: {url} answered 302: it has moved; give its address (https://new.example)\n"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of something that says `answer` to everybody."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
