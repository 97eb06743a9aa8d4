"""A filled batch as the trainer wants it: samples laid end to end and joined to the completions that this server served.

Invariants:
* The join is stored with the samples the first time a batch is built. Every later build (a replay) reads it, so the trainer gets
  the same bytes again whatever was served meanwhile.
* A group that straddles batches is whole in its statistics, as far as its samples were stored when the batch was first built.
* A sample is `matched` when each run of trained tokens in it is, with everything before it as prompt, a completion of this job.
  Several completions may have the same ids; the one whose log-probabilities are nearest to the uploaded ones is meant, of equal
  ones the newest.
* Temperature and filters are those of each turn: a conversation may be sampled with several.
* A sample is cut when the completion of its last turn was ended by its length limit. Of a last turn that matches nothing no limit
  is known: it counts as cut when the sample ends with it and it has as many tokens as the job's own limit allows.
* A greedy completion (temperature 0) reports raw log-probabilities, so it is handed over as temperature 1, `filtered`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, Row, bindparam, func, select, update

from upweight.server.store import completions, counts, schema
from upweight.server.store.rows import UNKNOWN_VERSION, completion_key
from upweight.server.worker_protocol import TrainBatch

TASKS_PER_QUERY = 500


@dataclass(frozen=True, kw_only=True)
class BuiltBatch:
    batch: TrainBatch
    sample_seqs: list[int]  # rows of the samples, in batch order
    metrics: dict[str, float]  # what the server itself knows: rewards, staleness, counts

    @property
    def only_lone_samples(self) -> bool:
        """Whether no sample has another of its task to be compared with."""
        members = np.bincount(np.concatenate([self.batch.group, self.batch.peer_group]))
        return bool(members.max(initial=0) == 1)


@dataclass(frozen=True, kw_only=True)
class Join:
    """What a sample's completions tell about its tokens (T of the sample)."""

    matched: bool
    filtered_T: np.ndarray  # uint8
    temperature_T: np.ndarray  # float32, 1 where unknown and on context
    raw_logprobs_T: np.ndarray  # float32, NaN where unknown
    versions_T: np.ndarray  # int32, -1 where unknown and on context
    truncated: bool


def join_batch(connection: Connection, job_id: str, index: int, *, max_tokens: int) -> None:
    """Join the samples of a batch that were not joined yet, and store the result. `max_tokens`: the job's limit of an answer."""
    rows = [row for row in _sample_rows(connection, job_id, index) if row.matched is None]
    if not rows:
        return
    _fix_horizon(connection, job_id, index)
    keys = {row.seq: list(_turn_keys(row)) for row in rows}
    served = completions.find(connection, job_id, [key for turns in keys.values() for _, _, key in turns])
    table = schema.samples
    change = update(table).where(table.c.seq == bindparam("the_seq"))
    names = ("matched", "filtered", "truncated", "filtered_tokens", "temperatures", "raw_logprobs", "versions")
    change = change.values({name: bindparam(f"the_{name}") for name in names})
    joined = [_join_values(row, keys[row.seq], served, max_tokens) for row in rows]
    connection.execute(change, joined)
    how = {"unmatched": "the_matched", "filtered": "the_filtered", "truncated": "the_truncated"}
    counts.add(
        connection,
        job_id,
        {name: sum(bool(values[key]) is (name != "unmatched") for values in joined) for name, key in how.items()},
    )


def build_batch(connection: Connection, job_id: str, index: int) -> BuiltBatch:
    """The joined batch. `join_batch` must have been committed before."""
    rows = _sample_rows(connection, job_id, index)
    versions = _concatenate(rows, "versions", "<i4")
    numbers = _group_numbers([row.task_id for row in rows])
    peer_reward, peer_group = _peers(
        connection, job_id, index, dict(zip((r.task_id for r in rows), numbers, strict=True))
    )
    batch = TrainBatch(
        lengths=np.array([len(row.token_ids) // 4 for row in rows], dtype=np.int32),
        token_ids=_concatenate(rows, "token_ids", "<i4"),
        logprobs=_concatenate(rows, "logprobs", "<f4"),
        mask=_concatenate(rows, "mask", "u1"),
        reward=np.array([row.reward for row in rows], dtype=np.float32),
        group=numbers,
        temperature=_concatenate(rows, "temperatures", "<f4"),
        raw_logprobs=_concatenate(rows, "raw_logprobs", "<f4"),
        versions=versions,
        filtered=_concatenate(rows, "filtered_tokens", "u1"),
        matched=np.array([row.matched for row in rows], dtype=np.uint8),
        truncated=np.array([bool(row.truncated) for row in rows], dtype=np.uint8),
        peer_reward=peer_reward,
        peer_group=peer_group,
    )
    return BuiltBatch(batch=batch, sample_seqs=[row.seq for row in rows], metrics=_metrics(rows, batch, index))


def _fix_horizon(connection: Connection, job_id: str, index: int) -> None:
    samples, table = schema.samples, schema.batches
    newest = connection.scalar(select(func.max(samples.c.seq)).where(samples.c.job_id == job_id))
    this = (table.c.job_id == job_id, table.c.batch_index == index)
    connection.execute(update(table).where(*this).values(joined_to=newest))


def _peers(
    connection: Connection, job_id: str, index: int, group_of: dict[str | None, np.int32]
) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and group numbers of the samples in other batches that belong to a task of this one."""
    samples, table = schema.samples, schema.batches
    horizon = connection.scalar(select(table.c.joined_to).where(table.c.job_id == job_id, table.c.batch_index == index))
    query = select(samples.c.task_id, samples.c.reward).where(
        samples.c.job_id == job_id, samples.c.batch_index != index, samples.c.seq <= (horizon or 0)
    )
    tasks = [task for task in group_of if task is not None]
    found: list[Row] = []
    for start in range(0, len(tasks), TASKS_PER_QUERY):
        some = tasks[start : start + TASKS_PER_QUERY]
        found += connection.execute(query.where(samples.c.task_id.in_(some)).order_by(samples.c.seq))
    return (
        np.array([row.reward for row in found], dtype=np.float32),
        np.array([group_of[row.task_id] for row in found], dtype=np.int32),
    )


def _sample_rows(connection: Connection, job_id: str, index: int) -> list[Row]:
    table = schema.samples
    query = select(table).where(table.c.job_id == job_id, table.c.batch_index == index).order_by(table.c.seq)
    return list(connection.execute(query))


def _concatenate(rows: list[Row], column: str, dtype: str) -> np.ndarray:
    return np.frombuffer(b"".join(getattr(row, column) for row in rows), dtype=dtype).copy()


def _group_numbers(task_ids: list[str | None]) -> np.ndarray:
    """Dense numbers in order of appearance; a sample without a task is a group of its own."""
    numbers: dict[object, int] = {}
    return np.array(
        [
            numbers.setdefault((position,) if task is None else task, len(numbers))
            for position, task in enumerate(task_ids)
        ],
        dtype=np.int32,
    )


def _runs(mask_T: np.ndarray) -> Iterator[tuple[int, int]]:
    """Start and end of each unbroken run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask_T != 0, [0])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _turn_keys(row: Row) -> Iterator[tuple[int, int, bytes]]:
    tokens_T = np.frombuffer(row.token_ids, dtype="<i4")
    for start, end in _runs(np.frombuffer(row.mask, dtype="u1")):
        yield start, end, completion_key(tokens_T[:start], tokens_T[start:end])


def _join_values(
    row: Row, turns: list[tuple[int, int, bytes]], served: dict[bytes, list[Row]], max_tokens: int
) -> dict[str, object]:
    join = _join(row, turns, served, max_tokens)
    return {
        "the_seq": row.seq,
        "the_matched": join.matched,
        "the_filtered": bool(join.filtered_T.any()),
        "the_truncated": join.truncated,
        "the_filtered_tokens": join.filtered_T.tobytes(),
        "the_temperatures": join.temperature_T.astype("<f4").tobytes(),
        "the_raw_logprobs": join.raw_logprobs_T.astype("<f4").tobytes(),
        "the_versions": join.versions_T.astype("<i4").tobytes(),
    }


def _join(row: Row, turns: list[tuple[int, int, bytes]], served: dict[bytes, list[Row]], max_tokens: int) -> Join:
    logprobs_T = np.frombuffer(row.logprobs, dtype="<f4")
    raw_T = np.full(len(logprobs_T), np.nan, dtype=np.float32)
    versions_T = np.full(len(logprobs_T), UNKNOWN_VERSION, dtype=np.int32)
    temperature_T = np.ones(len(logprobs_T), dtype=np.float32)
    filtered_T = np.zeros(len(logprobs_T), dtype=np.uint8)
    joined, truncated = 0, False
    for start, end, key in turns:
        if not (candidates := served.get(key)):
            truncated = end == len(logprobs_T) and end - start >= max_tokens
            continue
        best = min(reversed(candidates), key=lambda served_row: _distance(served_row, logprobs_T[start:end]))
        joined += 1
        truncated = best.finish_reason == "length"
        temperature_T[start:end], filtered_T[start:end] = best.temperature, best.filtered
        versions_T[start:end] = np.frombuffer(best.versions, dtype="<i4")
        if best.raw_logprobs is not None:
            raw_T[start:end] = np.frombuffer(best.raw_logprobs, dtype="<f4")
    return Join(
        matched=bool(turns) and joined == len(turns),
        filtered_T=filtered_T,
        temperature_T=temperature_T,
        raw_logprobs_T=raw_T,
        versions_T=versions_T,
        truncated=truncated,
    )


def _distance(served: Row, uploaded_R: np.ndarray) -> float:
    if served.logprobs is None:
        return float("inf")
    return float(np.max(np.abs(np.frombuffer(served.logprobs, dtype="<f4") - uploaded_R), initial=0.0))


def _metrics(rows: list[Row], batch: TrainBatch, index: int) -> dict[str, float]:
    raw = [row.raw_reward for row in rows if row.raw_reward is not None]
    known = batch.versions[batch.versions != UNKNOWN_VERSION]
    metrics = {
        "samples": float(len(rows)),
        "trained_tokens": float(batch.mask.sum()),
        "normalized_reward_mean": float(batch.reward.mean()),
        "unmatched": float(len(rows) - batch.matched.sum()),
        "filtered": float(sum(row.filtered for row in rows)),
        "truncated": float(batch.truncated.sum()),
    }
    if raw:
        metrics["reward_mean"] = float(np.mean(raw))
    if len(known):
        metrics["staleness_mean"] = float(np.mean(index - 1 - known))
        metrics["staleness_max"] = float(index - 1 - known.min())
    return metrics
