"""The store's promises, under random uploads and with its own process killed."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from upweight.errors import StoreError
from upweight.server.refusals import Refusal
from upweight.server.store import batches, engines, jobs, repeats, versions
from upweight.server.store import counts as kept
from upweight.server.store.database import Database
from upweight.server.store.rows import NewSample, pack_sample
from upweight.server.store.uploads import Upload
from upweight.server.worker_protocol import TrainResult

B = 3


def packed(id: str, reward: float = 1.0) -> NewSample:
    return pack_sample(
        id=id, token_ids=[1, 2], logprobs=[0.0, -0.5], mask=[0, 1], reward=reward, metadata={}, debug_info={}
    )


def new_job(database: Database, total: int | None = 4) -> str:
    settings = {"batch_size": B, "num_batches": total}
    return (
        database.submit(
            lambda c: jobs.create_job(c, project="p", model="m", model_path="/m", request={}, settings=settings)
        )
        .result()
        .id
    )


def open_batch(database: Database, job: str, index: int) -> dict:
    return database.submit(lambda c: batches.create_batch(c, jobs.get_job(c, job), index)).result()


def upload(database: Database, job: str, index: int, samples: list[NewSample]) -> dict:
    return database.submit(Upload(job_id=job, project="p", batch_index=index, samples=samples)).result()


uploads = st.lists(st.lists(st.tuples(st.integers(0, 14), st.booleans()), min_size=1, max_size=5), max_size=12)


@given(uploads)
@settings(max_examples=40, deadline=None)
def test_any_uploads_store_each_id_once_and_never_overfill(
    database: Database, plan: list[list[tuple[int, bool]]]
) -> None:
    """Against a model: what is accepted, what is refused, and where everything is afterwards."""
    job = new_job(database)
    stored: dict[str, float] = {}
    counts = [0, 0, 0, 0, 0]
    for wanted in plan:
        index = min(sum(counts) // B, 3)
        open_batch(database, job, index)
        samples = [packed(f"s{number}", 2.0 if changed else 1.0) for number, changed in wanted]
        known = dict(stored)
        conflict = False
        for one in samples:
            conflict = conflict or known.setdefault(one.id, one.reward) != one.reward
        added = len(known) - len(stored)
        if conflict or counts[index] + added > B:
            with pytest.raises(Refusal) as refused:
                upload(database, job, index, samples)
            assert refused.value.status == (422 if conflict else 409)
        else:
            answer = upload(database, job, index, samples)
            stored, counts[index] = known, counts[index] + added
            assert answer["sample_count"] == counts[index]
            assert answer["status"] == ("filled" if counts[index] == B else "filling")
        job_now = database.read_now(lambda c: jobs.get_job(c, job))
        assert job_now.filled_batches == sum(count == B for count in counts)
        assert database.read_now(lambda c: kept.recount(c, job)).get("accepted", 0) == len(stored)
        ledger = database.read_now(lambda c: versions.ledger(c, job))
        assert ledger["accepted"] == len(stored) == ledger["not_yet_trained"]


@given(
    st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=3), st.integers(0, 3)),
        max_size=8,
    )
)
@settings(max_examples=40, deadline=None)
def test_uploads_taken_together_leave_what_they_leave_one_by_one(
    database: Database, plan: list[tuple[list[tuple[int, bool]], int]]
) -> None:
    """`plan`: samples of an upload, and the number of its Idempotency-Key (0 = none)."""

    def outcome_of(order: Upload, connection: Connection) -> object:
        try:
            return order(connection)
        except Refusal as refused:
            return refused

    def told(outcomes: list[object]) -> list[object]:
        return [(one.status, one.detail) if isinstance(one, Refusal) else one for one in outcomes]

    found = []
    for together in (True, False):
        job = new_job(database)
        open_batch(database, job, 0)
        orders = [
            Upload(
                job_id=job,
                project="p",
                batch_index=0,
                samples=[packed(f"s{number}", 2.0 if changed else 1.0) for number, changed in samples],
                key=f"{job} {key}" if key else None,
                request_hash=repr(samples).encode(),
            )
            for samples, key in plan
        ]

        def run(connection: Connection, orders: list[Upload] = orders, together: bool = together) -> list[object]:
            if together and orders:
                return list(orders[0].together(connection, orders))
            return [outcome_of(order, connection) for order in orders]

        outcomes = database.submit(run).result()
        rows = database.read_now(lambda c, job=job: [(row.id, row.content_hash) for row in _rows(c, job)])
        job_now = database.read_now(lambda c, job=job: jobs.get_job(c, job))
        kept_now = database.read_now(lambda c, job=job: kept.read(c, job))
        found.append((str(told(outcomes)).replace(job, ""), rows, job_now.filled_batches, kept_now))
    assert found[0] == found[1]


def test_uploads_that_wait_for_the_writer_are_taken_together(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More rows than one statement has places for, each as it was sent."""
    settings = {"batch_size": 100, "num_batches": 1}
    more: dict[str, Any] = {"model": "m", "model_path": "/m", "request": {}, "settings": settings}
    job = database.submit(lambda c: jobs.create_job(c, project="p", **more)).result().id
    open_batch(database, job, 0)
    taken: list[int] = []
    take = Upload.together

    def counted(self: Upload, connection: Connection, uploads: list[Upload]) -> object:
        taken.append(len(uploads))
        return take(self, connection, uploads)

    monkeypatch.setattr(Upload, "together", counted)
    gate = threading.Event()
    held = database.submit(lambda c: gate.wait(20))
    sent = [replace(packed(f"s{i}", reward=i / 7), metadata={"at": f"{i} \u20ac"}) for i in range(70)]
    futures = [
        database.submit(Upload(job_id=job, project="p", batch_index=0, samples=sent[start : start + 7]))
        for start in range(0, 70, 7)
    ]
    gate.set()
    assert held.result()
    assert [future.result()["sample_count"] for future in futures] == list(range(7, 77, 7))
    assert taken == [10]
    assert not caplog.records
    names = [field.name for field in fields(NewSample)]
    rows = database.read_now(lambda c: [tuple(getattr(row, name) for name in names) for row in _rows(c, job)])
    assert rows == [tuple(vars(sample).values()) for sample in sent]


def test_an_upload_that_breaks_beside_others_breaks_alone(database: Database) -> None:
    """A row that the database refuses undoes the joint work; its neighbours are then taken one by one."""
    job = new_job(database)
    open_batch(database, job, 0)
    gate = threading.Event()
    held = database.submit(lambda c: gate.wait(20))
    broken = replace(packed("b"), reward=None)  # type: ignore[arg-type]
    futures = [
        database.submit(Upload(job_id=job, project="p", batch_index=0, samples=[sample]))
        for sample in (packed("a"), broken, packed("c"))
    ]
    gate.set()
    assert held.result()
    assert (futures[0].result()["sample_count"], futures[2].result()["sample_count"]) == (1, 2)
    with pytest.raises(Refusal, match="cannot be stored"):
        futures[1].result()
    assert [row.id for row in database.read_now(lambda c: _rows(c, job))] == ["a", "c"]


def test_an_overfull_upload_is_refused_whole_and_tells_the_numbers(database: Database) -> None:
    job = new_job(database)
    open_batch(database, job, 0)
    upload(database, job, 0, [packed("a"), packed("b")])
    with pytest.raises(Refusal) as refused:
        upload(database, job, 0, [packed("c"), packed("d")])
    assert (refused.value.status, refused.value.extra) == (409, {"sample_count": 2, "batch_size": 3})
    assert upload(database, job, 0, [packed("b"), packed("c")])["sample_count"] == 3


def test_batches_are_opened_in_order(database: Database) -> None:
    job = new_job(database)
    with pytest.raises(Refusal, match="in order"):
        open_batch(database, job, 1)
    assert open_batch(database, job, 0) == open_batch(database, job, 0)
    with pytest.raises(Refusal, match="has 4 batches"):
        open_batch(database, job, 4)


def test_two_uploaders_share_a_batch_without_overfilling(database: Database) -> None:
    job = new_job(database, total=1)
    open_batch(database, job, 0)

    def one(number: int) -> int:
        try:
            upload(database, job, 0, [packed(f"s{number}")])
        except Refusal as refused:
            return refused.status
        return 200

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(20)))
    assert (answers.count(200), answers.count(409)) == (B, 20 - B)
    assert database.read_now(lambda c: jobs.get_job(c, job)).filled_batches == 1


fates = st.lists(st.sampled_from(versions.FATES), min_size=B, max_size=B)


@given(fates)
@settings(max_examples=15, deadline=None)
def test_the_ledger_adds_up_for_any_fates(database: Database, given_fates: list[str]) -> None:
    job = new_job(database)
    for index in (0, 1):
        open_batch(database, job, index)
        upload(database, job, index, [packed(f"s{index}{i}") for i in range(B)])
    result = TrainResult(version=1, fingerprint="f", fingerprint_ok=True, fates=given_fates, seconds=1.0)
    seqs = database.read_now(lambda c: [row.seq for row in _rows(c, job)])[:B]
    database.submit(lambda c: versions.record_version(c, job, result, seqs, {})).result()
    assert database.read_now(lambda c: kept.read(c, job)) == database.read_now(lambda c: kept.recount(c, job))
    counts = database.read_now(lambda c: versions.ledger(c, job))
    assert counts["accepted"] == 2 * B == sum(counts[f] for f in versions.FATES) + counts["not_yet_trained"]
    for fate in versions.FATES:
        assert counts[fate] == given_fates.count(fate)


def _rows(connection, job: str) -> list:
    from upweight.server.supervision.training_data import _sample_rows

    return [row for index in (0, 1) for row in _sample_rows(connection, job, index)]


def test_a_failing_operation_disturbs_no_neighbour(database: Database) -> None:
    def bad(connection) -> None:
        jobs.set_fields(connection, job, reason="half done")
        raise ValueError("no")

    job = new_job(database)
    futures = [database.submit(bad), database.submit(lambda c: jobs.add_event(c, job, "kept"))]
    with pytest.raises(ValueError, match="no"):
        futures[0].result()
    futures[1].result()
    assert database.read_now(lambda c: jobs.get_job(c, job)).reason == "waits for a place"
    assert database.read_now(lambda c: jobs.list_events(c, job, limit=1, after=None))[0][0]["message"] == "kept"


def test_a_repeated_key_has_one_effect_and_one_answer(database: Database) -> None:
    seen: list[int] = []

    def effect(_connection) -> dict:
        seen.append(1)
        return {"number": len(seen)}

    def order(digest: bytes = b"x") -> tuple[dict, bool]:
        return database.submit(lambda c: repeats.once(c, "p", "key", digest, effect)).result()

    assert order() == ({"number": 1}, True)
    assert order() == ({"number": 1}, False)
    with pytest.raises(Refusal, match="another request"):
        order(b"y")


def test_versions_announced_never_fall(database: Database) -> None:
    job = new_job(database)
    for version in (0, 2, 1):
        database.submit(lambda c, version=version: jobs.announce_version(c, job, version)).result()
    assert database.read_now(lambda c: jobs.get_job(c, job)).inference_version == 2


def test_a_file_that_is_no_store_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    path.write_bytes(b"this is not a database, however long it may be" * 100)
    with pytest.raises(StoreError, match=r"store\.sqlite3 cannot be opened.*--home"):
        Database(path)


def test_a_store_that_another_program_holds_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "BUSY_SECONDS", 0.1)
    path = tmp_path / "store.sqlite3"
    Database(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="locked; another program holds it"):
            Database(path)


def test_a_full_disk_refuses_what_it_cannot_keep_and_goes_on_afterwards(tmp_path: Path) -> None:
    store = Database(tmp_path / "s.sqlite3")
    job = new_job(store, total=None)
    open_batch(store, job, 0)

    def limit_pages(pages: int) -> None:
        store.submit(lambda c: c.exec_driver_sql(f"PRAGMA max_page_count={pages}").all()).result()

    limit_pages(1)  # no more than there are now
    large = pack_sample(
        id="large", token_ids=[1] * 9999, logprobs=[0.0] * 9999, mask=[1] * 9999, reward=0, metadata={}, debug_info={}
    )
    started, go = threading.Event(), threading.Event()
    held = store.submit(lambda c: (started.set(), go.wait(10)))
    started.wait(10)  # the writer is busy now, so the next three orders share a transaction
    futures = [
        store.submit(lambda c: jobs.set_fields(c, job, reason="neighbour")),
        store.submit(Upload(job_id=job, project="p", batch_index=0, samples=[large])),
        store.submit(lambda c: jobs.set_fields(c, job, weights="later neighbour")),
    ]
    go.set()
    held.result()
    for future in futures:  # none is told that it was stored, for none was
        with pytest.raises(StoreError, match=r"did not commit.*full"):
            future.result()
    job_now = store.read_now(lambda c: jobs.get_job(c, job))
    assert (job_now.reason, job_now.weights) == ("waits for a place", None)
    assert store.read_now(lambda c: batches.read_batch(c, job_now, 0))["sample_count"] == 0
    limit_pages(100_000)
    assert upload(store, job, 0, [large])["sample_count"] == 1
    store.close()


def test_waiting_writes_share_commits(tmp_path: Path) -> None:
    """Group commits: 300 queued writes take far fewer than 300 commits."""
    from sqlalchemy import event

    store = Database(tmp_path / "s.sqlite3")
    commits: list[int] = []
    event.listen(store._writer, "commit", lambda _c: commits.append(1))
    job = new_job(store)

    async def many() -> None:
        await asyncio.gather(*(store.write(lambda c, i=i: jobs.add_event(c, job, str(i))) for i in range(300)))

    asyncio.run(many())
    assert len(commits) < 100
    store.close()


def test_an_older_store_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    store = Database(path)
    job = new_job(store)
    open_batch(store, job, 0)
    upload(store, job, 0, [packed("a")])
    store.close()
    with closing(sqlite3.connect(path)) as old:  # as version 2 had it
        old.execute("ALTER TABLE completions DROP COLUMN finish_reason")
        old.execute("ALTER TABLE samples DROP COLUMN truncated")
        old.execute("DROP TABLE counts")
        old.execute("UPDATE properties SET value = '2' WHERE name = 'schema'")
        old.commit()
    for held in (1, 2):
        store = Database(path)
        ledger = store.read_now(lambda c: versions.ledger(c, job))
        assert (ledger["accepted"], ledger["truncated"]) == (held, 0)
        upload(store, job, 0, [packed("b")])
        store.close()


def test_a_store_of_an_unknown_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    Database(path).close()
    with closing(sqlite3.connect(path)) as strange:
        strange.execute("UPDATE properties SET value = '99' WHERE name = 'schema'")
        strange.commit()
    with pytest.raises(StoreError, match="has schema 99, this server writes"):
        Database(path)
