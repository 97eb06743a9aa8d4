"""A multipart form with one file, written to the disk while it arrives.

Invariants:
* No more of the file than `HELD` bytes is in memory at a time; hashing and writing run in a thread.
* The file is on the disk (fsync) when `receive` returns; whatever else ends it leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from upweight.server.refusals import Refusal, invalid

HELD = 1 << 20
LONGEST_FIELD = 64 * 1024  # bytes of a field that is no file
MOST_FIELDS = 100
UNFINISHED = ".upload-"  # beginning of the name of a file that still arrives


@dataclass(frozen=True, kw_only=True)
class Received:
    """A form whose file lies at `path`."""

    path: Path
    size: int
    sha256: bytes
    filename: str
    fields: dict[str, str]


async def receive(request: Request, folder: Path, limit: int) -> Received:
    """Read the form of `request`. Raises Refusal: 422 for what is no such form, 413 beyond `limit` bytes, 507 on a full disk."""
    path = folder / f"{UNFINISHED}{secrets.token_hex(8)}"
    form = _Form(_boundary(request))
    try:
        with open(path, "wb", opener=_private) as file:
            await _copy(request, form, file, limit)
        return Received(
            path=path, size=form.size, sha256=form.digest.digest(), filename=form.filename or "", fields=form.fields
        )
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise Refusal(507, "the disk is full; the file was not stored") from error
        raise
    except BaseException:  # also when the client goes away
        path.unlink(missing_ok=True)
        raise


async def _copy(request: Request, form: _Form, file: BinaryIO, limit: int) -> None:
    async for chunk in request.stream():
        form.feed(chunk)
        if form.size > limit:
            raise Refusal(413, f"the file is larger than {limit / 1e6:g} MB; split it")
        if form.held > HELD:
            await asyncio.to_thread(form.write_to, file)
    form.end()
    await asyncio.to_thread(form.write_to, file)
    await asyncio.to_thread(os.fsync, file.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise invalid(("body",), "the body must be multipart/form-data with the fields file and purpose")
    return boundary


class _Form:
    """Takes a body apart as it comes."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0  # bytes of the file
        self.held = 0  # of them, not written yet
        self.digest = hashlib.sha256()
        self._data: list[bytes] = []
        self._name = self._header = ""
        self._is_file = self._complete = False
        self._field_data = b""
        self._disposition = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_begin": self._begin_header,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_headers_finished": self._name_part,
                "on_part_data": self._take,
                "on_part_end": self._end_part,
                "on_end": self._end_form,
            },
        )

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise invalid(("body",), f"the form cannot be read: {error}") from error

    def end(self) -> None:
        if not self._complete:
            raise invalid(("body",), "the form ends before its last boundary; send all of it")
        if self.filename is None:
            raise invalid(("body", "file"), "file is missing: a form field with a file name is needed", "missing")

    def write_to(self, file: BinaryIO) -> None:
        data, self._data, self.held = self._data, [], 0
        for piece in data:
            self.digest.update(piece)
            file.write(piece)
        file.flush()

    def _begin_part(self) -> None:
        self._disposition, self._field_data = b"", b""

    def _begin_header(self) -> None:
        self._header = ""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end].decode("latin-1").lower()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        if self._header == "content-disposition":
            self._disposition += data[start:end]

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        self._is_file = self._name == "file" and filename is not None
        if not self._is_file:
            return
        if self.filename is not None:
            raise invalid(("body", "file"), "the form holds more than one file; send one")
        self.filename = (filename or b"").decode(errors="replace")

    def _take(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._is_file:
            self._data.append(piece)
            self.size += len(piece)
            self.held += len(piece)
            return
        self._field_data += piece
        if len(self._field_data) > LONGEST_FIELD or len(self.fields) >= MOST_FIELDS:
            raise invalid(
                ("body", self._name[:80]),
                f"form field {self._name[:80]!r} is too long, or there are too many; is it the file? It needs the name file",
            )

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._field_data.decode(errors="replace")

    def _end_form(self) -> None:
        self._complete = True
