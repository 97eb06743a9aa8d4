"""Files, models, keys and what a tracker is told, in both kinds of store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from upweight.server import leftovers
from upweight.server.home import Home
from upweight.server.refusals import Refusal
from upweight.server.store import files, jobs, keys, models
from upweight.server.store.database import Database


def add_file(database: Database, name: str, project: str = "p", purpose: str = "batch") -> str:
    row: dict[str, Any] = {"filename": name, "purpose": purpose, "size": 5_000_000_000, "sha256": b"\x00\xff"}
    return database.submit(lambda c: files.add_file(c, id=f"file-{name}", project=project, **row)).result().id


def new_job(database: Database, project: str = "p") -> jobs.Job:
    settings = {"batch_size": 2, "num_batches": 2, "lora": {"rank": 4}}
    return database.submit(
        lambda c: jobs.create_job(c, project=project, model="m", model_path="/m", request={}, settings=settings)
    ).result()


def add_model(database: Database, job: jobs.Job, number: int, name: str) -> Any:
    more: dict[str, Any] = {"version": 1, "fingerprint": "f" * 32, "path": f"/models/{number}"}
    return database.submit(
        lambda c: models.add_model(c, model_id=f"ftmodel-{job.project}-{number}", name=name, job=job, **more)
    ).result()


def test_files_are_listed_by_cursor_and_purpose_and_seen_by_their_project(database: Database) -> None:
    made = [add_file(database, f"a{number}", "files") for number in range(3)]
    other = add_file(database, "b", "files", purpose="evals")
    foreign = add_file(database, "c", "other files")

    def page(**asked: Any) -> tuple[list[str], bool]:
        given: dict[str, Any] = {"limit": 2, "after": None, "purpose": None, "oldest_first": False, **asked}
        found, more = database.read_now(lambda c: files.list_files(c, "files", **given))
        return [file.id for file in found], more

    assert page() == ([other, made[2]], True)
    assert page(after=made[2]) == ([made[1], made[0]], False)
    assert page(purpose="batch", oldest_first=True, after=made[0]) == ([made[1], made[2]], False)
    stored = database.read_now(lambda c: files.get_file(c, made[0], "files"))
    assert (stored.size, bytes(stored.sha256)) == (5_000_000_000, b"\x00\xff")  # more than 32 bits; any bytes
    database.submit(lambda c: files.delete_file(c, made[0], "files")).result()
    for refused in (made[0], foreign, "file-none"):
        with pytest.raises(Refusal) as gone:
            database.read_now(lambda c, refused=refused: files.get_file(c, refused, "files"))
        assert gone.value.status == 404
    present = database.read_now(files.present_ids)
    assert made[0] not in present
    assert {made[1], other, foreign} <= present


def test_a_model_is_found_by_id_and_name_within_its_project(database: Database) -> None:
    job, foreign = new_job(database, "models"), new_job(database, "other models")
    first, second = add_model(database, job, 1, "sums"), add_model(database, job, 2, "sums-2")
    theirs = add_model(database, foreign, 1, "sums")  # a name is taken within a project only
    with pytest.raises(Refusal, match="'sums' exists already") as taken:
        add_model(database, job, 3, "sums")
    assert taken.value.status == 409
    for name in (first.id, "sums"):
        assert database.read_now(lambda c, name=name: models.find_model(c, "models", name)).id == first.id
    assert database.read_now(lambda c: models.find_model(c, "models", theirs.id)) is None
    assert [row.id for row in database.read_now(lambda c: models.list_models(c, "models"))] == [second.id, first.id]
    as_job = models.as_job(first)
    assert (as_job.settings["lora"], as_job.settings["batch_size"], as_job.weights) == (None, 2, "/models/1")


def test_keys_are_hashed_added_once_and_revoked(database: Database) -> None:
    for _ in range(2):  # a server adds the key of its home at each start
        database.submit(lambda c: keys.add_key(c, "uw-one", "keys")).result()
    assert database.read_now(lambda c: keys.project_of(c, "uw-one")) == "keys"
    assert database.read_now(lambda c: keys.project_of(c, "uw-on")) is None
    listed = [row for row in database.read_now(keys.list_keys) if row.project == "keys"]
    assert len(listed) == 1
    assert "uw-one" not in str(listed[0])
    assert database.submit(lambda c: keys.revoke_key(c, keys.key_id("uw-one"))).result()
    assert database.read_now(lambda c: keys.project_of(c, "uw-one")) is None


def test_client_metrics_are_read_on_from_a_row(database: Database) -> None:
    job = new_job(database)
    for index in range(3):
        told = {"held_out": index / 4}
        database.submit(lambda c, index=index, told=told: jobs.add_client_metrics(c, job.id, index, told)).result()
    rows = database.read_now(lambda c: jobs.client_metrics_since(c, job.id, 0))
    assert [(row.batch_index, row.metrics) for row in rows] == [(index, {"held_out": index / 4}) for index in range(3)]
    later = database.read_now(lambda c: jobs.client_metrics_since(c, job.id, rows[0].seq))
    assert [row.seq for row in later] == [row.seq for row in rows[1:]]


def test_what_no_row_names_goes_from_the_home_folder_of_the_store(database: Database, tmp_path: Path) -> None:
    job, home = new_job(database, "leftovers"), Home(tmp_path)
    model, file = add_model(database, job, 9, "leftover"), add_file(database, "leftover")
    kept = [home.jobs / job.id, home.jobs / model.id, home.models / model.id, home.files / file]
    gone = [home.jobs / "ftjob-x", home.models / ".ftmodel-x.partial", home.files / ".upload-x"]
    for folder in [*kept, *gone]:
        folder.mkdir()
    name = database.submit(leftovers.owner).result()
    assert database.submit(leftovers.owner).result() == name
    assert [leftovers.belongs_to(home, one) for one in (name, name, "another")] == [False, True, False]
    database.read_now(lambda c: leftovers.remove(c, home))
    assert [path for path in [*kept, *gone] if path.exists()] == kept
