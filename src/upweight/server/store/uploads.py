"""Samples that come in. Uploads into one batch that wait together are taken together: a few statements for all of them.

Invariants:
* A sample id enters a job once. The same id with the same content changes nothing; with other content its upload is refused (422).
* A batch never holds more than `batch_size` samples: an upload whose new ids do not all fit is refused whole (409).
* Batches fill in order, and `filled_batches` grows in the transaction that stores the last sample of a batch.
* Uploads taken together leave what they leave one after the other, in their order, and get the same answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, select
from sqlalchemy.exc import IntegrityError

from upweight.server.refusals import Refusal, not_found
from upweight.server.store import counts, repeats, schema
from upweight.server.store.batches import answer_of, get_batch, refuse_if_closed, set_count
from upweight.server.store.bulk import insert_many
from upweight.server.store.jobs import Job, get_job
from upweight.server.store.rows import NewSample

IDS_PER_QUERY = 500

# Made once: making a statement takes longer than running it.
_GET_HASHES = select(schema.samples.c.id, schema.samples.c.content_hash).where(
    schema.samples.c.job_id == bindparam("the_job"), schema.samples.c.id.in_(bindparam("ids", expanding=True))
)


@dataclass(frozen=True, kw_only=True)
class Upload:
    """An operation of the store: add the samples that are new to the job, all or none; answers the batch.

    With the `key` of an earlier request its answer is given again. Raises Refusal 404, 409 or 422.
    """

    job_id: str
    project: str
    batch_index: int
    samples: Sequence[NewSample]
    key: str | None = None
    request_hash: bytes = b""

    @property
    def kind(self) -> tuple[str, str, int]:
        return self.job_id, self.project, self.batch_index

    def together(self, connection: Connection, uploads: Sequence[Upload]) -> list[dict | Exception]:
        """Outcomes of `uploads`, which are of this kind."""
        return _take(connection, uploads)

    def __call__(self, connection: Connection) -> dict:
        (outcome,) = _take(connection, [self])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _take(connection: Connection, uploads: Sequence[Upload]) -> list[dict | Exception]:
    first = uploads[0]
    keys = [upload.key for upload in uploads if upload.key is not None]
    answered = repeats.first_answers(connection, first.project, keys)
    try:
        job = get_job(connection, first.job_id, first.project)
        batch = get_batch(connection, first.job_id, first.batch_index)
        if batch is None:
            raise not_found("batch", first.batch_index)
    except Refusal as refused:
        return [refused for _ in uploads]
    ids = (sample.id for upload in uploads for sample in upload.samples)
    filling = _Filling(job, first.batch_index, batch.sample_count, _hashes(connection, job.id, ids))
    outcomes: list[dict | Exception] = []
    kept: list[repeats.Answered] = []
    for upload in uploads:
        try:
            known = None if upload.key is None else answered.get(upload.key)
            if known is not None:
                outcomes.append(known.to(upload.request_hash))
                continue
            answer = filling.take(upload.samples)
            outcomes.append(answer)
            if upload.key is not None:
                answered[upload.key] = repeats.Answered(upload.key, upload.request_hash, answer)
                kept.append(answered[upload.key])
        except Refusal as refused:
            outcomes.append(refused)
    filling.store(connection)
    repeats.keep(connection, first.project, kept)
    return outcomes


class _Filling:
    """A batch with what uploads bring to it, until `store` writes that."""

    def __init__(self, job: Job, index: int, held: int, hashes: dict[str, bytes]) -> None:
        self._job, self._index, self._held, self._hashes = job, index, held, hashes
        self._new: list[NewSample] = []

    def take(self, samples: Sequence[NewSample]) -> dict:
        """The batch's answer with the new ones among `samples`. Raises Refusal, and takes none then."""
        new = self._new_ones(samples)
        if new:
            refuse_if_closed(self._job)
            free = self._job.batch_size - self._held
            if len(new) > free:
                raise Refusal(
                    409,
                    f"batch {self._index} has {free} free places of {self._job.batch_size}, the upload brings {len(new)} "
                    "new samples; nothing was stored",
                    sample_count=self._held,
                    batch_size=self._job.batch_size,
                )
            self._held += len(new)
            self._hashes |= {id: sample.content_hash for id, sample in new.items()}
            self._new += new.values()
        return answer_of(self._job, self._index, self._held)

    def store(self, connection: Connection) -> None:
        if not self._new:
            return
        common = {"job_id": self._job.id, "batch_index": self._index}
        try:
            insert_many(connection, schema.samples, [common | vars(sample) for sample in self._new])
        except IntegrityError as error:
            raise Refusal(422, f"a sample cannot be stored: {error.orig}") from error
        counts.add(connection, self._job.id, {"accepted": len(self._new)})
        set_count(connection, self._job, self._index, self._held, at=time.time())

    def _new_ones(self, samples: Sequence[NewSample]) -> dict[str, NewSample]:
        """The samples whose ids the job does not hold yet, in order. Raises Refusal 422 on changed content."""
        new: dict[str, NewSample] = {}
        for position, sample in enumerate(samples):
            stored = self._hashes.get(sample.id) or (new[sample.id].content_hash if sample.id in new else None)
            if stored is None:
                new[sample.id] = sample
            elif stored != sample.content_hash:
                message = f"sample {sample.id!r} is already stored with other content; use a new id for other content"
                raise Refusal(
                    422, [{"loc": ["body", "samples", position, "id"], "msg": message, "type": "id_conflict"}]
                )
        return new


def _hashes(connection: Connection, job_id: str, ids: Iterable[str]) -> dict[str, bytes]:
    wanted = list(dict.fromkeys(ids))
    found: dict[str, Any] = {}
    for start in range(0, len(wanted), IDS_PER_QUERY):
        some = wanted[start : start + IDS_PER_QUERY]
        rows = connection.execute(_GET_HASHES, {"the_job": job_id, "ids": some})
        found.update((row.id, row.content_hash) for row in rows)
    return found
