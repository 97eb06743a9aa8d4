"""The join of uploaded samples to served completions, in numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upweight.server.api.served import StreamReader, sampling_of, served_of
from upweight.server.store import batches, completions, counts, jobs, versions
from upweight.server.store.database import Database
from upweight.server.store.rows import NewSample, completion_key, pack_sample
from upweight.server.store.uploads import Upload
from upweight.server.supervision.training_data import BuiltBatch, build_batch, join_batch
from upweight.server.worker_protocol import decode_batch, encode_batch


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    store = Database(tmp_path / "store.sqlite3")
    yield store
    store.close()


def answer(prompt: list[int], output: list[int], logprobs: list[float], version: int, **choice: Any) -> dict[str, Any]:
    content = [{"token": f"token_id:{t}", "logprob": p} for t, p in zip(output, logprobs, strict=True)]
    whole = {"token_ids": output, "logprobs": {"content": content}, **choice}
    return {"prompt_token_ids": prompt, "inference_version": version, "choices": [whole]}


def serve(database: Database, job: str, request: dict[str, Any], reply: dict[str, Any]) -> None:
    database.submit(lambda c: completions.remember(c, job, served_of(request, reply))).result()


def packed(id: str, tokens: list[int], logprobs: list[float], mask: list[int], **debug: Any) -> NewSample:
    return pack_sample(id=id, token_ids=tokens, logprobs=logprobs, mask=mask, reward=0.5, metadata={}, debug_info=debug)


def start_job(database: Database, samples: int) -> str:
    settings = {"batch_size": samples, "num_batches": None}
    job = database.submit(
        lambda c: jobs.create_job(c, project="p", model="m", model_path="/m", request={}, settings=settings)
    ).result()
    database.submit(lambda c: batches.create_batch(c, job, 0)).result()
    return job.id


def build(database: Database, job: str) -> BuiltBatch:
    database.submit(lambda c: join_batch(c, job, 0, max_tokens=4)).result()
    assert database.read_now(lambda c: counts.read(c, job)) == database.read_now(lambda c: counts.recount(c, job))
    return database.read_now(lambda c: build_batch(c, job, 0))


def test_a_conversation_of_two_turns_is_joined_turn_by_turn(database: Database) -> None:
    job = start_job(database, 3)
    request = {"temperature": 0.5, "top_p": 0.9}
    serve(database, job, request, answer([1, 2], [3, 4], [-0.1, -0.2], 0, tempered_logprobs=[-1.1, -1.2]))
    serve(
        database,
        job,
        {"temperature": 0.25},
        answer([1, 2, 3, 4, 5], [6, 7], [-0.3, -0.4], 0, token_inference_versions=[0, 1]),
    )
    samples = [
        packed(
            "two turns", [1, 2, 3, 4, 5, 6, 7], [0, 0, -0.1, -0.2, 0, -0.3, -0.4], [0, 0, 1, 1, 0, 1, 1], task_id="a"
        ),
        packed("made elsewhere", [9, 9], [0, -0.5], [0, 1], task_id="a", reward=3),
        packed("no task", [1, 2, 8], [0, 0, -1.0], [0, 0, 1]),
    ]
    database.submit(Upload(job_id=job, project="p", batch_index=0, samples=samples)).result()
    built = build(database, job)
    batch = built.batch
    assert batch.lengths.tolist() == [7, 2, 3]
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 9, 1, 2, 8]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.matched.tolist() == [1, 0, 0]
    assert batch.filtered.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert batch.temperature.tolist() == [1.0, 1.0, 0.5, 0.5, 1.0, 0.25, 0.25, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert batch.versions.tolist() == [-1, -1, 0, 0, -1, 0, 1, -1, -1, -1, -1, -1]
    np.testing.assert_array_equal(batch.raw_logprobs[2:4], np.float32([-1.1, -1.2]))
    assert np.isnan(batch.raw_logprobs[[0, 1, 4, 5, 6, 7, 11]]).all()
    assert built.metrics["unmatched"] == 2.0
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    assert built.metrics.keys() <= set(re.findall(r"`(\w+)`", page))
    assert built.metrics["filtered"] == 1.0
    assert built.metrics["reward_mean"] == 3.0
    assert built.metrics["staleness_max"] == -1.0  # version 0 in batch 0


def test_of_completions_with_the_same_ids_the_nearest_one_is_meant(database: Database) -> None:
    job = start_job(database, 1)
    for version, logprob in ((0, -0.5), (1, -0.7), (2, -0.9)):
        serve(database, job, {}, answer([1], [2], [logprob], version))
    database.submit(
        Upload(job_id=job, project="p", batch_index=0, samples=[packed("s", [1, 2], [0, -0.71], [0, 1])])
    ).result()
    assert build(database, job).batch.versions.tolist() == [-1, 1]


def test_a_batch_is_built_with_the_same_bytes_whatever_is_served_later(database: Database) -> None:
    job = start_job(database, 1)
    database.submit(
        Upload(job_id=job, project="p", batch_index=0, samples=[packed("s", [1, 2], [0, -0.7], [0, 1])])
    ).result()
    before = encode_batch(build(database, job).batch)
    serve(database, job, {"temperature": 0.3}, answer([1], [2], [-0.7], 5))
    assert encode_batch(build(database, job).batch) == before
    assert decode_batch(before).matched.tolist() == [0]


def test_a_group_that_straddles_two_batches_is_whole_in_its_statistics(database: Database) -> None:
    job = start_job(database, 2)
    rewards = {"a": (0, 1.0, "t"), "b": (0, 0.0, "u"), "c": (1, -2.0, "u"), "d": (1, 3.0, None)}
    for id, (index, reward, task) in rewards.items():
        debug = {} if task is None else {"task_id": task}
        sample = pack_sample(
            id=id, token_ids=[1, 2], logprobs=[0, -1], mask=[0, 1], reward=reward, metadata={}, debug_info=debug
        )
        database.submit(lambda c, i=index: batches.create_batch(c, jobs.get_job(c, job), i)).result()
        database.submit(Upload(job_id=job, project="p", batch_index=index, samples=[sample])).result()
        if id == "b":
            built = build(database, job)
            first = built.batch
    assert len(first.peer_reward) == 0  # nothing else was stored when it was first built …
    assert len(build(database, job).batch.peer_reward) == 0  # … and a replay sees no more
    database.submit(lambda c: join_batch(c, job, 1, max_tokens=4)).result()
    later = database.read_now(lambda c: build_batch(c, job, 1))
    assert (built.only_lone_samples, later.only_lone_samples) == (True, False)  # "c" has a peer in the batch before
    second = later.batch
    assert (second.group.tolist(), second.reward.tolist()) == ([0, 1], [-2.0, 3.0])
    assert (second.peer_group.tolist(), second.peer_reward.tolist()) == ([0], [0.0])
    back = decode_batch(encode_batch(second))
    assert (back.peer_group.tolist(), back.select(np.array([0])).peer_reward.tolist()) == ([0], [0.0])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({}, (1.0, False)),
        ({"temperature": None, "top_p": None, "top_k": 0}, (1.0, False)),
        ({"temperature": 0.7, "top_p": 1, "top_k": -1}, (0.7, False)),
        ({"temperature": 0}, (1.0, True)),
        ({"top_k": 50}, (1.0, True)),
        ({"top_p": 0.9}, (1.0, True)),
        ({"min_p": 0.1}, (1.0, True)),
        ({"presence_penalty": 0.1}, (1.0, True)),
        ({"repetition_penalty": 1.1}, (1.0, True)),
        ({"logit_bias": {"5": 1}}, (1.0, True)),
    ],
)
def test_what_counts_as_filtered(request_: dict[str, Any], expected: tuple[float, bool]) -> None:
    assert sampling_of(request_)[:2] == expected


def test_text_completions_are_read_too() -> None:
    logprobs = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-0.5, -0.25]}
    reply = {"prompt_token_ids": [1], "inference_version": 4, "choices": [{"index": 0, "logprobs": logprobs}]}
    (served,) = served_of({}, reply)
    assert np.frombuffer(served.logprobs or b"", "<f4").tolist() == [-0.5, -0.25]
    assert np.frombuffer(served.versions, "<i4").tolist() == [4, 4]
    assert served_of({}, {**reply, "prompt_token_ids": None}) == []


def test_a_stream_is_put_together_whatever_its_chunks() -> None:
    events = (
        b'data: {"prompt_token_ids":[1],"inference_version":2,"choices":[{"index":0,"token_ids":[5]}]}\n\n'
        b': comment\n\ndata: {"choices":[{"index":0,"token_ids":[6]}]}\n\ndata: {"choices":[],"usage":{}}\n\n'
        b"data: [DONE]\n\n"
    )
    for size in (1, 7, len(events)):
        reader, passed, done = StreamReader(), [], []
        for start in range(0, len(events), size):
            for event in reader.feed(events[start : start + size]):
                passed.append(event)
                done += reader.take(event)
        assert b"".join(passed) == events
        (choice,) = done
        assert (choice["prompt_token_ids"], choice["inference_version"], choice["token_ids"]) == ([1], 2, [5, 6])


def test_a_choice_is_complete_with_its_finish_reason_and_told_once() -> None:
    reader = StreamReader()
    assert reader.take(b'data: {"choices":[{"index":0,"token_ids":[5]}]}\n\n') == []
    assert reader.take(b'data: {"choices":[{"index":1,"token_ids":[7]}]}\n\n') == []
    (first,) = reader.take(b'data: {"choices":[{"index":1,"token_ids":[8],"finish_reason":"stop"}]}\n\n')
    assert first["token_ids"] == [7, 8]
    (rest,) = reader.take(b"data: [DONE]\n\n")
    assert rest["token_ids"] == [5]
    assert reader.take(b'data: {"choices":[{"index":2,"delta":{"content":"[DONE]"}}]}\n\n') == []


def test_each_prompt_of_a_request_has_completions_of_its_own() -> None:
    choices = [{"index": i, "prompt_token_ids": [i + 1], "token_ids": [9], "logprobs": None} for i in (0, 1)]
    found = served_of({}, {"prompt_token_ids": [1], "inference_version": 0, "choices": choices})
    assert [one.key for one in found] == [completion_key(np.array([i]), np.array([9])) for i in (1, 2)]


def test_whether_a_sample_was_cut_is_known_from_its_last_turn(database: Database) -> None:
    """By the finish reason of what was served; of a last turn made elsewhere by the job's own limit, here 4 tokens."""
    job = start_job(database, 6)
    serve(database, job, {}, answer([1], [2, 3], [-0.1, -0.2], 0, finish_reason="length"))
    serve(database, job, {}, answer([1, 2, 3, 4], [5], [-0.3], 0, finish_reason="stop"))
    serve(database, job, {}, answer([9], [5, 5, 5, 5], [-0.3] * 4, 0, finish_reason="stop"))
    samples = {
        "cut": ([1, 2, 3], [0, 1, 1]),
        "cut, then continued": ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]),
        "as long as the limit, but stopped": ([9, 5, 5, 5, 5], [0, 1, 1, 1, 1]),
        "elsewhere, as long as the limit": ([8, 5, 5, 5, 5], [0, 1, 1, 1, 1]),
        "elsewhere, shorter": ([8, 5, 5, 5], [0, 1, 1, 1]),
        "elsewhere, and something follows": ([8, 5, 5, 5, 5, 6], [0, 1, 1, 1, 1, 0]),
    }
    rows = [packed(id, ids, [-0.3 * m for m in mask], mask) for id, (ids, mask) in samples.items()]
    database.submit(Upload(job_id=job, project="p", batch_index=0, samples=rows)).result()
    built = build(database, job)
    assert dict(zip(samples, built.batch.truncated.tolist(), strict=True)) == {
        "cut": 1,
        "cut, then continued": 0,
        "as long as the limit, but stopped": 0,
        "elsewhere, as long as the limit": 1,
        "elsewhere, shorter": 0,
        "elsewhere, and something follows": 0,
    }
    assert built.metrics["truncated"] == 2.0
    assert database.read_now(lambda c: versions.ledger(c, job))["truncated"] == 2
    assert decode_batch(encode_batch(built.batch)).truncated.tolist() == built.batch.truncated.tolist()


def test_a_streamed_choice_keeps_its_finish_reason() -> None:
    reader = StreamReader()
    event = (
        b'data: {"prompt_token_ids": [1], "choices": [{"index": 0, "token_ids": [2], "finish_reason": "length"}]}\n\n'
    )
    (choice,) = reader.take(event)
    (served,) = served_of({}, {"choices": [choice]})
    assert served.finish_reason == "length"
