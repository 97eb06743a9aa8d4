"""The store in PostgreSQL: a job's life, a server killed, the database restarted, two servers, and what is refused."""

from __future__ import annotations

import pytest
from postgres import Cluster, NewDatabase
from server_harness import Start, sample

from upweight.errors import StoreError
from upweight.server.store.database import Database


@pytest.mark.ci
def test_a_job_lives_through_restarts_of_server_and_database(
    start: Start, postgresql: NewDatabase, postgresql_cluster: Cluster
) -> None:
    url = postgresql()
    server = start(store=url)
    job = server.create_job(num_batches=3)
    server.fill(job, 0)
    server.wait(job, lambda p: p["inference_version"] == 1)
    assert not (server.home / "store.sqlite3").exists()

    postgresql_cluster.stop()
    refused = server.http.post(server.rl(job, "batches"), json={"index": 1})
    assert refused.status_code == 503, refused.text
    assert "nothing was stored, try again" in refused.json()["detail"]
    assert server.http.get("/healthz").status_code == 200
    postgresql_cluster.start()
    server.fill(job, 1)
    server.wait(job, lambda p: p["inference_version"] == 2)
    server.stop()

    server = start(store=url)
    server.wait(job, lambda p: p["inference_version"] == 2)
    server.fill(job, 2)
    end = server.wait_status(job, "succeeded")
    assert (end["ledger"]["accepted"], end["ledger"]["trained"]) == (6, 6)
    assert server.http.get(f"/v1/fine_tuning/jobs/{job}").json()["trained_tokens"] == 18
    listed = server.http.get(server.rl(job, "samples"), params={"search": "t1"}).json()["data"]
    assert {one["batch_index"] for one in listed} == {1}
    log = (server.home / "logs" / "server.log").read_text() if (server.home / "logs" / "server.log").exists() else ""
    assert "secret-word" not in log + "".join(server.events(job))


@pytest.mark.ci
def test_one_server_a_database(postgresql: NewDatabase) -> None:
    url = postgresql()
    first = Database(url, alone=True)
    with pytest.raises(StoreError, match="in use by another server") as refused:
        Database(url, alone=True)
    assert "secret-word" not in str(refused.value)
    Database(url).close()  # a command beside the server
    first.close()
    Database(url, alone=True).close()


@pytest.mark.ci
def test_a_text_that_it_cannot_hold_is_refused_whole(start: Start, postgresql: NewDatabase) -> None:
    server = start(store=postgresql())
    job = server.create_job()
    server.http.post(server.rl(job, "batches"), json={"index": 0})
    answer = server.upload(job, 0, [sample("a"), sample("b\x00")])
    assert answer.status_code == 422, answer.text
    assert "cannot hold" in answer.json()["detail"]
    assert server.upload(job, 0, [sample("a"), sample("b")]).json()["status"] == "filled"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("mysql://u:secret-word@h/d", "postgresql://USER:PASSWORD@HOST/DATABASE is needed"),
        ("secret-word", "not a URL"),
        ("postgresql://u:secret-word@127.0.0.1:1/d", "cannot be opened"),
    ],
)
def test_a_place_that_cannot_be_opened_is_one_line_without_the_password(place: str, words: str) -> None:
    with pytest.raises(StoreError, match=words) as refused:
        Database(place, alone=True)
    assert "secret-word" not in str(refused.value)
