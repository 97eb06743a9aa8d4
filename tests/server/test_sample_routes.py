"""Samples as a person reads them: lists by window, search, one sample with its tokens, staleness."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_harness import Running, sample, servers


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """A job of the fake worker with two trained batches of three and one open batch of two."""
    folder = tmp_path_factory.mktemp("samples")
    with servers(folder) as begin:
        server = begin({"fates": ["trained", "zero_advantage", "masked"]})
        job = server.create_job(batch_size=3, num_batches=3)
        for index, count in ((0, 3), (1, 3), (2, 2)):
            server.http.post(server.rl(job, "batches"), json={"index": index})
            named = [
                sample(f"s{index}/{i}", debug_info={"task_id": f"task{index}", "note": f"note {i}"})
                for i in range(count)
            ]
            assert server.upload(job, index, named).status_code == 200
        server.wait(job, lambda p: p["version"] == 2)
        yield server, job


def ask(filled: tuple[Running, str], path: str = "samples", **query: Any) -> dict[str, Any]:
    server, job = filled
    answer = server.http.get(server.rl(job, path), params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(answer: dict[str, Any]) -> list[str]:
    return [one["id"] for one in answer["data"]]


NEWEST_FIRST = ["s2/1", "s2/0", "s1/2", "s1/1", "s1/0", "s0/2", "s0/1", "s0/0"]


def test_the_list_is_newest_first_and_says_what_became_of_each(filled: tuple[Running, str]) -> None:
    answer = ask(filled)
    assert (ids(answer), answer["next"]) == (NEWEST_FIRST, None)
    assert [one["fate"] for one in answer["data"][:3]] == ["not_yet_trained", "not_yet_trained", "masked"]
    first = answer["data"][-1]
    assert (first["tokens"], first["trained_tokens"], first["batch_index"], first["task_id"]) == (6, 3, 0, "task0")
    assert (first["matched"], first["staleness"], first["text"]) == (False, None, None)  # no model, no tokenizer


@pytest.mark.parametrize("limit", [1, 3, 4, 8])
@pytest.mark.parametrize("query", [{}, {"fate": "trained"}, {"search": "NOTE 1"}, {"batch": 1}])
def test_pages_put_together_are_the_whole(filled: tuple[Running, str], limit: int, query: dict[str, Any]) -> None:
    whole = ids(ask(filled, **query))
    found: list[str] = []
    after = None
    for _ in range(12):
        answer = ask(filled, limit=limit, **query, **({"after": after} if after else {}))
        assert len(answer["data"]) <= limit
        found += ids(answer)
        if (after := answer["next"]) is None:
            break
    assert found == whole


def test_narrowing(filled: tuple[Running, str]) -> None:
    assert ids(ask(filled, batch=1)) == ["s1/2", "s1/1", "s1/0"]
    assert ids(ask(filled, fate="zero_advantage")) == ["s1/1", "s0/1"]
    assert ids(ask(filled, fate="not_yet_trained")) == ["s2/1", "s2/0"]
    assert ids(ask(filled, search="task1")) == ["s1/2", "s1/1", "s1/0"]
    assert ids(ask(filled, search="nowhere")) == []


def test_one_sample_tells_all_of_its_tokens(filled: tuple[Running, str]) -> None:
    one = ask(filled, "samples/s0/1")
    assert one["token_ids"] == [11, 12, 13, 21, 22, 2]
    assert one["logprobs"] == [0.0, 0.0, 0.0, -0.1, -0.2, -0.3]
    assert one["mask"] == [0, 0, 0, 1, 1, 1]
    assert one["versions"] == [None] * 6
    assert (one["fate"], one["debug_info"]["note"]) == ("zero_advantage", "note 1")
    assert ask(filled, "samples/s2/0")["versions"] is None  # not joined yet
    json.dumps(one, allow_nan=False)


def test_staleness_is_counted(filled: tuple[Running, str]) -> None:
    assert ask(filled, "staleness") == {"counts": {}, "unknown": 8}
    assert ask(filled, "staleness", batch=2) == {"counts": {}, "unknown": 2}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("samples/none", 404),
        ("samples?limit=0", 422),
        ("samples?limit=201", 422),
        ("samples?fate=unknown", 422),
        ("samples?batch=-1", 422),
        ("samples?after=x", 400),
        ("samples?after=1", 400),
        (f"samples?after=1-{'9' * 30}", 400),
        (f"samples?search={'x' * 201}", 422),
    ],
)
def test_refusals(filled: tuple[Running, str], path: str, status: int) -> None:
    server, job = filled
    assert server.http.get(server.rl(job, path)).status_code == status


def test_pieces_are_text_with_the_tokens_of_a_real_tokenizer() -> None:
    from upweight.server.sample_views import pieces
    from upweight.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(Path(__file__).parents[1] / "data" / "smollm2")
    text = "<|im_start|>user\nnaïve 🤖 ok"
    found = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(found) == text
    assert found[0] == "<|im_start|>"
    assert len(found) == len(tokenizer.encode(text))
