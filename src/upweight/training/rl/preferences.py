"""Pairs of a preferred and a rejected answer."""

from __future__ import annotations

from typing import Generic, TypeVar

from flax import nnx

from upweight.errors import BatchError, BatchTypeError

T = TypeVar("T")


@nnx.dataclass
class PreferenceBatch(nnx.Pytree, Generic[T]):
    """Row i of `chosen` is preferred to row i of `rejected`. Both are batches of anything that has a `batch_size`."""

    chosen: T = nnx.data()
    rejected: T = nnx.data()

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            half = getattr(self, name)
            if not hasattr(half, "batch_size"):
                raise BatchTypeError(f"{name} is a {type(half).__name__}, it must be a batch with a batch_size")
        sizes = self.chosen.batch_size, self.rejected.batch_size  # type: ignore[attr-defined]
        if sizes[0] != sizes[1]:
            raise BatchError(f"chosen and rejected must have the same batch size, they have {sizes[0]} and {sizes[1]}")

    @property
    def batch_size(self) -> int:
        return self.chosen.batch_size  # type: ignore[attr-defined]
