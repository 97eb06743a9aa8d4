"""A job's training file as rows of tokens, and the trainer that works through them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from upweight.errors import RequestError, TrainingError
from upweight.server.training_file import LineError, Row, read_rows
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.answers import Marked, mark_answers
from upweight.training.row_trainer import (
    PreferenceSettings,
    PreferenceTrainer,
    RowTrainer,
    SupervisedTrainer,
    optimizer_settings,
)
from upweight.training.rows import TokenSequence, TrainRow
from upweight.weights.loading import LoadedModel

TELL_EVERY = 1.0  # seconds
NAMED = 5  # lines that a note names


@dataclass(kw_only=True)
class LoadedRows:
    rows: list[TrainRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class _Odd:
    """Lines that are trained on otherwise than one might expect."""

    cut: list[int] = field(default_factory=list)
    nothing_left: list[int] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    endless: list[int] = field(default_factory=list)

    def notes(self, name: str, limit: int) -> list[str]:
        texts = {
            f"longer than {limit} tokens: cut there": self.cut,
            f"without a trained token within the first {limit}: left out": self.nothing_left,
            "whose history the chat template rewrites: each answer is trained after the history as it is written for it": self.split,
            "whose answers end without an end-of-turn token in the chat template: the model does not learn to stop": self.endless,
        }
        return [f"{name}: {_lines(lines)} {text}" for text, lines in texts.items() if lines]


def load_rows(
    path: Path, kind: str, settings: Mapping[str, Any], model: LoadedModel, tell: Callable[[str], None]
) -> LoadedRows:
    """All rows of the file, with the model's own template and tokenizer. `TrainingError` naming the line that cannot be."""
    limit = min(settings.get("context_length") or model.config.max_context, model.config.max_context)
    loaded, odd, told, name = LoadedRows(), _Odd(), time.monotonic(), f"{path.stem} file"
    try:
        for row in read_rows(path, kind):
            loaded.rows.append(_train_row(row, model.tokenizer, model.config.vocab_size, limit, odd, name))
            if time.monotonic() - told > TELL_EVERY:
                told = time.monotonic()
                tell(f"reading the {name}: {len(loaded.rows)} of {settings['rows']} rows")
    except (OSError, LineError) as error:
        raise TrainingError(f"the job's {name} {path} cannot be read any more: {error}") from error
    if len(loaded.rows) != settings["rows"]:
        raise TrainingError(f"the job's {name} {path} holds {len(loaded.rows)} rows, it held {settings['rows']}")
    if not any(row.usable for row in loaded.rows):
        raise TrainingError(f"no row of the {name} has a trained token within the first {limit} tokens")
    loaded.notes = odd.notes(name, limit)
    return loaded


def row_trainer(
    kind: str, settings: Mapping[str, Any], model: LoadedModel, rows: list[TrainRow], *, microbatch_tokens: int
) -> RowTrainer:
    optimizer = optimizer_settings(settings)
    if kind == "supervised":
        return SupervisedTrainer(
            model.config,
            model.params,
            optimizer,
            rows,
            microbatch_tokens=microbatch_tokens,
            share_rows=bool(settings["packing"]),
            lora_dropout=settings["lora_dropout"],
        )
    preference = PreferenceSettings(
        loss_type=settings["loss_type"],
        beta=settings["beta"],
        label_smoothing=settings["label_smoothing"],
        length_normalized=settings["length_normalized"],
    )
    return PreferenceTrainer(
        model.config, model.params, optimizer, rows, preference=preference, microbatch_tokens=microbatch_tokens
    )


def _train_row(row: Row, tokenizer: Tokenizer, vocab_size: int, limit: int, odd: _Odd, name: str) -> TrainRow:
    parts = []
    for conversation in row.conversations:
        try:
            marked = mark_answers(tokenizer, conversation.messages, conversation.trained, conversation.tools)
        except RequestError as error:
            raise TrainingError(f"{name}, line {row.line}: {error}") from error
        sequences = tuple(_sequence(one, limit) for one in marked)
        _note(odd, row.line, marked, sequences, limit)
        if (largest := max((max(one.ids, default=0) for one in marked), default=0)) >= vocab_size:
            raise TrainingError(
                f"{name}, line {row.line}: the tokenizer gives token {largest}, the model knows {vocab_size} tokens"
            )
        parts.append(sequences)
    made = TrainRow(line=row.line, parts=tuple(parts))
    if not made.usable:
        odd.nothing_left.append(row.line)
    return made


def _sequence(marked: Marked, limit: int) -> TokenSequence:
    return TokenSequence(ids=np.array(marked.ids, np.int32), mask=np.array(marked.mask, np.uint8)).cut(limit)


def _note(odd: _Odd, line: int, marked: list[Marked], sequences: tuple[TokenSequence, ...], limit: int) -> None:
    for lines, holds in (
        (odd.cut, any(sum(one.mask) > int(kept.mask.sum()) for one, kept in zip(marked, sequences, strict=True))),
        (odd.split, len(marked) > 1),
        (odd.endless, not all(one.ends for one in marked)),
    ):
        if holds and lines[-1:] != [line]:
            lines.append(line)


def _lines(lines: list[int]) -> str:
    named = ", ".join(str(line) for line in lines[:NAMED])
    more = f" and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
    return f"{'line' if len(lines) == 1 else 'lines'} {named}{more}"
