"""Versions, their checkpoints, and the ledger of what became of each sample.

Invariants:
* A version is recorded once; recording it again with another fingerprint is an error of the caller (`check_fingerprint`).
* accepted = trained + zero_advantage + masked + stale + refused + not_yet_trained, at any moment.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, insert, select, update

from upweight.server.store import counts, schema
from upweight.server.worker_protocol import TrainResult

UNTRAINED = "not_yet_trained"  # what stands for a fate before there is one
FATES = ("trained", "zero_advantage", "masked", "stale", "refused")


def get_version(connection: Connection, job_id: str, version: int) -> Row | None:
    table = schema.versions
    return connection.execute(select(table).where(table.c.job_id == job_id, table.c.version == version)).first()


def newest_version(connection: Connection, job_id: str) -> int | None:
    """The highest version recorded for the job; None before the start model was loaded once."""
    table = schema.versions
    return connection.scalar(select(func.max(table.c.version)).where(table.c.job_id == job_id))


def newest_metrics(connection: Connection, job_id: str) -> dict[str, float]:
    """Of the newest version; nothing for a start model."""
    table = schema.versions
    query = select(table.c.metrics).where(table.c.job_id == job_id).order_by(table.c.version.desc()).limit(1)
    found: dict[str, float] | None = connection.scalar(query)
    return found or {}


def versions_since(connection: Connection, job_id: str, version: int) -> list[Row]:
    """Versions above `version`, oldest first."""
    table = schema.versions
    query = select(table).where(table.c.job_id == job_id, table.c.version > version).order_by(table.c.version)
    return list(connection.execute(query))


def total(connection: Connection, job_id: str, metric: str) -> float:
    """Sum of a metric over all versions of the job."""
    table = schema.versions
    number = table.c.metrics[metric].as_float()
    return connection.scalar(select(func.sum(number)).where(table.c.job_id == job_id)) or 0.0


def record_start(connection: Connection, job_id: str, fingerprint: str) -> None:
    """Version 0: the start model as loaded."""
    _insert_version(connection, job_id, 0, fingerprint, update_skipped=False, seconds=0.0, metrics={})


def record_version(
    connection: Connection, job_id: str, result: TrainResult, sample_seqs: list[int], metrics: dict[str, float]
) -> None:
    """Store a new version and the fates of its samples (`sample_seqs` in batch order; none for a file) in one transaction."""
    _insert_version(
        connection,
        job_id,
        result.version,
        result.fingerprint,
        update_skipped=result.update_skipped,
        seconds=result.seconds,
        metrics=metrics,
    )
    if not sample_seqs:  # rows of a file: their fates are counted in the metrics
        return
    table = schema.samples
    change = update(table).where(table.c.seq == bindparam("the_seq")).values(fate=bindparam("the_fate"))
    connection.execute(change, [{"the_seq": s, "the_fate": f} for s, f in zip(sample_seqs, result.fates, strict=True)])
    counts.add(connection, job_id, Counter(result.fates))


def _insert_version(connection: Connection, job_id: str, version: int, fingerprint: str, **values: Any) -> None:
    row = {"job_id": job_id, "version": version, "created_at": time.time(), "fingerprint": fingerprint, **values}
    connection.execute(insert(schema.versions).values(**row))


def set_checkpoint(connection: Connection, job_id: str, version: int, path: str | None) -> None:
    table = schema.versions
    this = (table.c.job_id == job_id, table.c.version == version)
    connection.execute(update(table).where(*this).values(checkpoint=path))


def checkpoints(connection: Connection, job_id: str) -> list[Row]:
    """Versions that have a checkpoint, newest first."""
    table = schema.versions
    query = select(table).where(table.c.job_id == job_id, table.c.checkpoint.is_not(None))
    return list(connection.execute(query.order_by(table.c.version.desc())))


def ledger(connection: Connection, job_id: str) -> dict[str, int]:
    """Counts per fate, which add up to `accepted`; `unmatched`, `filtered` and `truncated` say how a sample was drawn, and are counted apart."""
    found = counts.read(connection, job_id)
    accepted, apart = found.pop("accepted", 0), {name: found.pop(name, 0) for name in counts.APART}
    by_fate = {fate: found.pop(fate, 0) for fate in FATES}
    assert not found, f"unknown fates {sorted(found)}"
    return {"accepted": accepted, **by_fate, UNTRAINED: accepted - sum(by_fate.values()), **apart}


def file_ledger(connection: Connection, job_id: str, settings: dict[str, Any]) -> dict[str, int]:
    """The same for a job that trains on a file: each row counts once an epoch."""
    accepted = settings["rows"] * settings["n_epochs"]
    by_fate = dict.fromkeys(FATES, 0)
    by_fate |= {fate: int(total(connection, job_id, f"samples_{fate}")) for fate in ("trained", "masked")}
    by_fate[UNTRAINED] = accepted - sum(by_fate.values())
    return {"accepted": accepted, **by_fate, **dict.fromkeys(counts.APART, 0)}
