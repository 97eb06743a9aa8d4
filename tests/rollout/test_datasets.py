"""Adaptors and their cursors; nothing is skipped or repeated by a resumed run but what was in flight."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FakeJobServer
from upweight.rollout import CyclingDataset, DatasetExhausted, RolloutRunner
from upweight.rollout.cursor import DataCursor
from upweight.rollout.datasets import IterableDataset, JsonLinesDataset, SequenceDataset, from_hugging_face
from upweight.rollout.models import SampleGroup

from . import helpers


class Rows:
    """What `datasets.Dataset` looks like from outside."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index}


MAKERS = {
    "iterable": lambda: IterableDataset(range(100)),
    "sequence": lambda: SequenceDataset(list(range(7)), epochs=None),
    "shuffled": lambda: SequenceDataset(list(range(7)), shuffle=True, seed=3, epochs=None),
    "cycling": lambda: CyclingDataset(list(range(7))),
    "hugging face": lambda: from_hugging_face(Rows(), shuffle=True, epochs=9),
}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=30, deadline=None)
@given(before=st.lists(st.integers(1, 9), max_size=4), after=st.integers(1, 9))
def test_a_restored_dataset_gives_what_it_would_have_given(name: str, before: list[int], after: int) -> None:
    first = MAKERS[name]()
    for n in before:
        first.sample(n)
    state = json.loads(json.dumps(first.state()))
    expected = first.sample(after)
    assert expected
    second = MAKERS[name]()
    second.restore(state)
    assert second.sample(after) == expected
    first.restore(state)  # also backwards
    assert first.sample(after) == expected


def test_epochs_end_and_each_has_its_own_order() -> None:
    dataset = SequenceDataset("abcdefgh", shuffle=True, seed=1, epochs=2, transform=str.upper)
    epochs = [dataset.sample(8), dataset.sample(8)]
    assert [sorted(epoch) for epoch in epochs] == [list("ABCDEFGH")] * 2
    assert epochs[0] != epochs[1]
    assert dataset.sample(3) == []
    assert SequenceDataset("abcdefgh", shuffle=True, seed=2).sample(8) != [c.lower() for c in epochs[0]]


def test_bad_data_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'{"a": 1}\n\n{"a": 2}\n{"a": \n')
    with pytest.raises(ValueError, match=r"tasks.jsonl, line 4: no JSON"):
        JsonLinesDataset(file)
    file.write_bytes(b'"\xff"\n')
    with pytest.raises(ValueError, match="line 1: no JSON"):
        JsonLinesDataset(file)
    file.write_bytes(b"\n")
    with pytest.raises(ValueError, match="holds no line"):
        JsonLinesDataset(file)
    file.write_bytes(b'{"a": 1}\n\n{"a": 2}\n')
    assert JsonLinesDataset(file, epochs=None, transform=lambda row: row["a"]).sample(3) == [1, 2, 1]
    with pytest.raises(ValueError, match="several splits"):
        from_hugging_face({"train": Rows()})
    with pytest.raises(ValueError, match="shuffle it with its own"):
        from_hugging_face(iter(range(3)), shuffle=True)
    assert from_hugging_face(iter(range(3))).sample(9) == [0, 1, 2]
    generator = IterableDataset(iter(range(3)))
    generator.sample(2)
    with pytest.raises(ValueError, match="in place of a generator"):
        generator.restore({"position": 1})
    with pytest.raises(ValueError, match="end at 3, before the position 5"):
        generator.restore({"position": 5})
    with pytest.raises(ValueError, match="a dataset state is"):
        generator.restore({"place": 5})
    with pytest.raises(ValueError, match="epochs is 0"):
        SequenceDataset([1], epochs=0)
    with pytest.raises(ValueError, match="items is empty"):
        SequenceDataset([])


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_cursor_repeats_exactly_what_was_not_settled(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Report P1."""
    folder = tmp_path_factory.mktemp("spool")
    done: set[int] = set()
    for _ in range(data.draw(st.integers(1, 4), label="runs")):
        dataset = SequenceDataset(list(range(40)))
        cursor = DataCursor(dataset, folder, "job/1")
        cursor.rewind()
        flying: list[tuple[int, int]] = []
        for n in data.draw(st.lists(st.integers(1, 6), max_size=4), label="draws"):
            state = dataset.state()
            flying += cursor.number(dataset.sample(n), state)
            for number, task in (
                data.draw(st.lists(st.sampled_from(flying), unique=True), label="ends") if flying else []
            ):
                cursor.settle(number)
                cursor.save()
                flying.remove((number, task))
                assert task not in done  # nothing is repeated once it is done
                done.add(task)
    dataset = SequenceDataset(list(range(40)))
    cursor = DataCursor(dataset, folder, "job/1")
    cursor.rewind()
    left = []
    for _ in range(9):
        state = dataset.state()
        left += [task for _, task in cursor.number(dataset.sample(7), state)]
    assert left == [task for task in range(40) if task not in done]


@pytest.mark.parametrize("ends", ["stop", "new process"])
def test_a_resumed_run_goes_on_with_the_data(ends: str, tmp_path: Path, server: FakeJobServer, api: Any) -> None:
    """Reports P1, P2, P3, P4: two runs over 12 tasks for 12 places; each task is in exactly one stored sample."""
    lock, started = threading.Lock(), []
    blocked, first_run = threading.Event(), threading.Event()

    def rollout(task: int, context: Any) -> SampleGroup:
        with lock:
            started.append(task)
        if task in (2, 5) and not first_run.is_set():
            blocked.wait(20)
        sample = helpers.good_sample()
        sample.metadata = {"task": str(task)}
        return SampleGroup(samples=[sample])

    def make_runner() -> RolloutRunner:
        settings = helpers.config(spool_dir=tmp_path, allowed_staleness=None, shutdown_timeout=1.0)
        return RolloutRunner(api, settings, rollout, SequenceDataset(list(range(12))))

    runner = make_runner()
    thread = threading.Thread(target=runner.run)
    thread.start()
    while len(server.samples()) < 6:
        blocked.wait(0.02)
    runner.stop()
    thread.join(10)
    first_run.set()
    blocked.set()
    stored = [sample["metadata"]["task"] for sample in server.samples()]
    assert not {"2", "5"} & set(stored)
    summary = (runner if ends == "stop" else make_runner()).run()
    assert summary.batches_filled == 3
    tasks = sorted(int(sample["metadata"]["task"]) for sample in server.samples())
    assert tasks == list(range(12))


def test_without_a_cursor_or_a_spool_nothing_changes(make_runner: Any, tmp_path: Path) -> None:
    assert make_runner(dataset=helpers.Counting(), spool_dir=tmp_path).run().batches_filled == 3
    assert not list(tmp_path.rglob("cursor"))
    with pytest.raises(DatasetExhausted):
        make_runner(dataset=SequenceDataset([1, 2]), num_batches=9).run()


def test_a_broken_cursor_file_is_named(make_runner: Any, tmp_path: Path) -> None:
    file = tmp_path / "job-1" / "cursor"
    file.parent.mkdir()
    file.write_text("[]")
    with pytest.raises(ValueError, match="cursor is no dataset cursor"):
        make_runner(dataset=SequenceDataset([1, 2]), spool_dir=tmp_path).run()
