"""Datasets for runs, made of what people have: any iterable, a sequence, a JSONL file, a Hugging Face `datasets` object.

Each has a cursor: `state()` is a small JSON object, `restore(state)` goes there. The order depends on the arguments
alone, so a restored dataset gives exactly what it would have given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any


def _same(item: Any) -> Any:
    return item


def position_in(state: object) -> int:
    """Raises `ValueError` for what is no state of these datasets."""
    position = state.get("position") if isinstance(state, dict) else None
    if not isinstance(position, int) or position < 0:
        raise ValueError(f"a dataset state is {{'position': whole number from 0}}, not {state!r}")
    return position


class IterableDataset:
    """Goes through `items` once; then the data has ended. `transform` makes a task of an item.

    Restoring goes forward by skipping. Going back starts `items` anew, which a generator does not allow.
    """

    def __init__(self, items: Iterable[Any], *, transform: Callable[[Any], Any] = _same) -> None:
        self._items = items
        self._transform = transform
        self._position = 0
        self._rest: Iterator[Any] = iter(items)

    def sample(self, n_samples: int) -> list[Any]:
        found = list(islice(self._rest, n_samples))
        self._position += len(found)
        return [self._transform(item) for item in found]

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises `ValueError` when it would have to go back and cannot, or ends before the position."""
        wanted = position_in(state)
        if wanted < self._position:
            again = iter(self._items)
            if again is self._items:
                raise ValueError(
                    f"the items were already read up to {self._position}, beyond {wanted}, and cannot be read again: "
                    "give a list, or an object whose __iter__ starts anew, in place of a generator"
                )
            self._rest, self._position = again, 0
        skipped = sum(1 for _ in islice(self._rest, wanted - self._position))
        self._position += skipped
        if self._position < wanted:
            raise ValueError(f"the items end at {self._position}, before the position {wanted} to be restored")


class SequenceDataset:
    """Goes through what has a length and an index, `epochs` times (None = without end).

    With `shuffle` each epoch has an order of its own, which depends on `seed` and the number of the epoch alone.
    `transform` makes a task of an item.
    """

    def __init__(
        self,
        items: Sequence[Any],
        *,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        transform: Callable[[Any], Any] = _same,
    ) -> None:
        if len(items) == 0:
            raise ValueError("items is empty: a dataset needs at least one task")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be from 1, or None for no end")
        self._items, self._transform = items, transform
        self._shuffle, self._seed, self._epochs = shuffle, seed, epochs
        self._position = 0
        self._order: tuple[int, list[int]] | None = None  # of one epoch

    def __len__(self) -> int:
        return len(self._items)

    def sample(self, n_samples: int) -> list[Any]:
        end = self._position + n_samples
        if self._epochs is not None:
            end = min(end, self._epochs * len(self._items))
        found = [self._transform(self._items[self._index(place)]) for place in range(self._position, end)]
        self._position = end
        return found

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = position_in(state)

    def _index(self, place: int) -> int:
        epoch, offset = divmod(place, len(self._items))
        if not self._shuffle:
            return offset
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self._items)))
            Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = epoch, order
        return self._order[1][offset]


class JsonLinesDataset(SequenceDataset):
    """A file with one JSON value a line; blank lines are left out. It is read and checked at once.

    Raises:
        ValueError: naming the first line that is no JSON.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        transform: Callable[[Any], Any] = _same,
    ) -> None:
        items = _read_lines(Path(path))
        if not items:
            raise ValueError(f"{path} holds no line: a dataset needs at least one task")
        super().__init__(items, shuffle=shuffle, seed=seed, epochs=epochs, transform=transform)


def _read_lines(path: Path) -> list[Any]:
    items = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                items.append(json.loads(line))
            except ValueError as error:  # also bytes that are no UTF-8
                raise ValueError(f"{path}, line {number}: no JSON: {error}") from None
    return items


def from_hugging_face(
    dataset: Any,
    *,
    shuffle: bool = False,
    seed: int = 0,
    epochs: int | None = 1,
    transform: Callable[[Any], Any] = _same,
) -> SequenceDataset | IterableDataset:
    """A `datasets.Dataset` (rows are dicts), or a streaming one, which is read once in its own order.

    Raises:
        ValueError: several splits at once; shuffling or repeating of a streaming dataset.
    """
    if isinstance(dataset, dict):
        raise ValueError(
            f"this holds several splits ({', '.join(map(str, dataset))}); choose one: dataset[{next(iter(dataset), 'train')!r}]"
        )
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return SequenceDataset(dataset, shuffle=shuffle, seed=seed, epochs=epochs, transform=transform)
    if shuffle or epochs != 1:
        raise ValueError("a streaming dataset is read once in its own order: shuffle it with its own shuffle(seed=…)")
    return IterableDataset(dataset, transform=transform)
