"""Where tasks come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DatasetProtocol(Protocol[T_co]):
    """Gives tasks. Fewer than asked is fine; none at all means that the data has ended."""

    def sample(self, n_samples: int, /) -> Iterable[T_co]: ...


class CyclingDataset(Generic[T]):
    """Goes through `items` again and again, in order. Its cursor is restored on resume (`upweight.rollout.datasets`)."""

    def __init__(self, items: Sequence[T]) -> None:
        if not items:
            raise ValueError("items is empty: a cycle needs at least one task")
        self._items = items
        self._position = 0

    def sample(self, n_samples: int) -> list[T]:
        first, self._position = self._position, self._position + n_samples
        return [self._items[place % len(self._items)] for place in range(first, self._position)]

    def state(self) -> dict[str, int]:
        return {"position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        self._position = state["position"]
