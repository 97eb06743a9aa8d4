"""Reads the header of a GGUF file: its metadata and the places of its tensors, not the tensors.

A vocabulary is some hundred thousand short strings. The reader of the `gguf` package makes several arrays of each,
which takes seconds; walking the bytes once takes a tenth of one, and a start-up waits for it.

Invariants
- Every length and count is checked against the file's size before it is used: a damaged file is a `ModelError`.
- Dimensions are given as GGUF stores them, fastest first.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upweight.errors import ModelError, ModelNotFound

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor lies."""

    name: str  # the GGUF name, such as blk.0.attn_q.weight
    dims: tuple[int, ...]  # fastest first
    ggml_type: int  # number of the storage type (0 is float32)
    offset: int  # bytes from the start of the file


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensor places of one file."""

    path: str
    metadata: dict[str, Any]
    tensors: tuple[TensorPlace, ...]


def read_header(path: str | Path) -> GgufHeader:
    """The header of the GGUF file at `path`; raises `ModelNotFound` or `ModelError`."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walker(data, str(path)).header()
    except (FileNotFoundError, IsADirectoryError):
        raise ModelNotFound(f"no GGUF file at {path}") from None
    except (struct.error, ValueError, KeyError, OverflowError) as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}): fetch it again") from error


class _Walker:
    """A position in the mapped file that only moves forward."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        n_tensors, n_entries = self._scalar("Q"), self._scalar("Q")
        metadata = dict(self._entry() for _ in range(n_entries))
        places = [self._place() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        tensors = tuple(TensorPlace(name, dims, kind, start + offset) for name, dims, kind, offset in places)
        return GgufHeader(self._path, metadata, tensors)

    def _entry(self) -> tuple[str, Any]:
        return self._string(), self._value(self._scalar("I"))

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n_dims = self._string(), self._scalar("I")
        return name, self._scalars("Q", n_dims), self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_scalar_format(kind))
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        return list(self._scalars(_scalar_format(kind), count))

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        if size > len(self._data) - self._at:
            raise ValueError(f"{count} values at byte {self._at} reach past its end")
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += size
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """`count` strings, each a length and its bytes. The one hot loop of this file: everything is a local name."""
        data, at, end = self._data, self._at, len(self._data)
        unpack: Callable[..., tuple[Any, ...]] = _LENGTH.unpack_from
        texts: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                raise ValueError(f"a string at byte {start} reaches past its end")
            texts.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return texts


def _scalar_format(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]
