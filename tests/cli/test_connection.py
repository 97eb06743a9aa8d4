import json
import os
from pathlib import Path

import pytest

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
