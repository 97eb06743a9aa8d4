"""A training file as tokens of a real model folder: limits, notes, failures that name the line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upweight.errors import TrainingError
from upweight.server.file_methods import parse_file_method
from upweight.server.worker.file_rows import LoadedRows, load_rows
from upweight.weights.loading import LoadedModel, load_model


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> LoadedModel:
    return load_model(str(tiny_model_folder))


def row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def loaded(folder: Path, model: LoadedModel, rows: list[Any], kind: str = "supervised", **more: Any) -> LoadedRows:
    path = folder / "training.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    method = parse_file_method({"type": kind, kind: {"hyperparameters": more}}, None)
    return load_rows(path, kind, method.settings(len(rows)), model, lambda _: None)


def test_rows_are_the_template_with_the_answer_marked(tmp_path: Path, model: LoadedModel) -> None:
    found = loaded(tmp_path, model, [row("hi", "yes")])
    (only,) = found.rows[0].parts[0]
    trained = only.ids[only.mask > 0].tolist()
    assert model.tokenizer.decode(trained, skip_special_tokens=False) == "yes<|im_end|>"
    asked = model.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert only.ids.tolist() == [*asked, *trained]  # nothing behind the end of the turn
    assert found.notes == []


def test_what_is_too_long_is_cut_and_told(tmp_path: Path, model: LoadedModel) -> None:
    rows = [row("hi", "a " * 600), row("a " * 600, "yes"), row("hi", "yes")]
    found = loaded(tmp_path, model, rows)
    assert [len(one.parts[0][0].ids) for one in found.rows][:2] == [512, 0]
    assert [one.usable for one in found.rows] == [True, False, True]
    assert found.notes == [
        "training file: lines 1, 2 longer than 512 tokens: cut there",
        "training file: line 2 without a trained token within the first 512: left out",
    ]
    shorter = loaded(tmp_path, model, rows, context_length=40)
    assert len(shorter.rows[0].parts[0][0].ids) == 40


def test_a_pair_needs_both_of_its_answers(tmp_path: Path, model: LoadedModel) -> None:
    pair = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    found = loaded(tmp_path, model, [pair, {**pair, "prompt": "a " * 600}], "dpo")
    chosen, rejected = (part[0] for part in found.rows[0].parts)
    context = int(np.argmax(chosen.mask))
    assert chosen.ids[:context].tolist() == rejected.ids[:context].tolist()
    assert [one.usable for one in found.rows] == [True, False]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("a " * 600, "yes")], "no row of the training file has a trained token within the first 512 tokens"),
        (
            [row("hi", "yes"), {"messages": [{"role": "user", "content": "x"}]}],
            "line 2: messages: no assistant message",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_told_in_one_line(
    tmp_path: Path, model: LoadedModel, rows: list[Any], words: str
) -> None:
    with pytest.raises(TrainingError, match=words):
        loaded(tmp_path, model, rows)


def test_a_template_that_refuses_names_the_line(tmp_path: Path, model: LoadedModel) -> None:
    tokenizer = model.tokenizer
    picky = type(tokenizer)(replace(tokenizer._parts, chat_template="{{ raise_exception('no such roles') }}"))
    with pytest.raises(
        TrainingError, match=r"training file, line 1: messages: the chat template refuses them: no such"
    ):
        loaded(tmp_path, replace(model, tokenizer=picky), [row("hi", "yes")])


def test_a_tokenizer_larger_than_the_model_is_told(tmp_path: Path, model: LoadedModel) -> None:
    small = replace(model, config=replace(model.config, vocab_size=5))
    with pytest.raises(TrainingError, match=r"line 1: the tokenizer gives token \d+, the model knows 5 tokens"):
        loaded(tmp_path, small, [row("hi", "yes")])


def test_a_file_with_other_rows_than_it_had_is_told(tmp_path: Path, model: LoadedModel) -> None:
    path = tmp_path / "training.jsonl"
    path.write_text(json.dumps(row("hi", "yes")) + "\n")
    settings = parse_file_method({"type": "supervised"}, None).settings(2)
    with pytest.raises(TrainingError, match="holds 1 rows, it held 2"):
        load_rows(path, "supervised", settings, model, lambda _: None)
