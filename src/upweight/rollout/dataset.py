"""Where tasks come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DatasetProtocol(Protocol[T_co]):
    """Gives tasks. Fewer than asked is fine; none at all means that the data has ended."""

    def sample(self, n_samples: int, /) -> Iterable[T_co]: ...


class CyclingDataset(Generic[T]):
    """Goes through `items` again and again, in order."""

    def __init__(self, items: Sequence[T]) -> None:
        if not items:
            raise ValueError("items is empty: a cycle needs at least one task")
        self._items: Iterator[T] = cycle(items)

    def sample(self, n_samples: int) -> list[T]:
        return list(islice(self._items, n_samples))
