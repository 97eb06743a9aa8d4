"""`upweight keys` and `upweight backup` on a real home folder."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from upweight.server.home import Home

from .conftest import Command


def test_a_key_opens_its_project_alone_until_it_is_revoked(
    upweight: Command, server_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPWEIGHT_HOME", str(server_home))
    url = (Home(server_home).read_server() or {})["url"]

    def status(key: str) -> int:
        return httpx.get(f"{url}/v1/fine_tuning/jobs", headers={"Authorization": f"Bearer {key}"}).status_code

    key = upweight("keys", "create", "--project", "team-b").out.strip()
    assert key.startswith("uw-")
    assert status(key) == 200
    listed = upweight("keys", "list", "--json").json()
    (mine,) = [one for one in listed if one["project"] == "team-b"]
    assert key not in upweight("keys", "list").out
    assert upweight("keys", "revoke", mine["id"]).code == 0

    end = time.monotonic() + 15
    while status(key) != 401:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert status((server_home / "api_key").read_text().strip()) == 200


@pytest.mark.parametrize("project", ["", "a b", "-x", "x" * 65, "a/b"])
def test_a_bad_project_is_refused(upweight: Command, tmp_path: Path, project: str) -> None:
    done = upweight("keys", "create", "--project", project, "--home", str(tmp_path))
    assert (done.code, done.err.startswith(f"error: project {project!r}")) == (1, True)


def test_an_unknown_key_is_named(upweight: Command, tmp_path: Path) -> None:
    done = upweight("keys", "revoke", "key-0", "--home", str(tmp_path))
    assert (done.code, done.err) == (1, "error: no key 'key-0' in this store: `upweight keys list` shows them\n")


def test_the_key_of_the_home_itself_does_not_come_back(upweight: Command, tmp_path: Path) -> None:
    key, _ = Home(tmp_path).api_key()
    upweight("keys", "create", "--home", str(tmp_path))
    from upweight.server.store import keys
    from upweight.server.store.database import Database

    database = Database(tmp_path / "store.sqlite3")
    database.submit(lambda c: keys.add_key(c, key)).result()
    database.close()
    done = upweight("keys", "revoke", keys.key_id(key), "--home", str(tmp_path))
    assert "the next start of the server makes a new one" in done.out
    assert not (tmp_path / "api_key").exists()


def test_backup_says_what_it_copied(upweight: Command, server_home: Path, tmp_path: Path) -> None:
    done = upweight("backup", str(tmp_path / "copy"), "--home", str(server_home))
    assert done.code == 0, done.err
    assert done.out.startswith(f"{tmp_path / 'copy'}: ")
    assert (tmp_path / "copy" / "api_key").stat().st_mode & 0o777 == 0o600
    assert upweight("backup", str(tmp_path / "copy"), "--home", str(server_home)).code == 1
