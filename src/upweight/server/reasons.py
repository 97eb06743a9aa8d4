"""The server's HTTP/1.1: reason phrases that say why, and an end for connections that nobody uses.

Some clients show nothing but the phrase of a 401, 403, 409, 413 or 429, and ASGI has no place for one. The application puts it into
the header `REASON`, and this protocol, given to uvicorn as `http=`, moves it from there to the status line.

Invariants:
* A connection without a whole request header ends after the keep-alive time, also one that never sent or that sends byte by byte.
* A client whose machine vanished is found out within two minutes, and what it asked for ends with it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REASON = "x-reason"
LONGEST = 300  # characters
PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}  # seconds, seconds, how many unanswered


def reason_header(text: str) -> dict[str, str]:
    """The header for a reason phrase: one line of printable ASCII."""
    line = "".join(letter if " " <= letter <= "~" else "?" for letter in " ".join(text.split()))
    line = line[:LONGEST].rstrip()  # a header that ends in a space is none
    return {REASON: line} if line else {}


class _Connection(h11.Connection):
    def send(self, event: Any) -> Any:
        if isinstance(event, h11.Response):
            event = _with_reason(event)
        return super().send(event)


def _with_reason(response: h11.Response) -> h11.Response:
    phrase = dict(response.headers).get(REASON.encode())
    if phrase is None:
        return response
    headers = [(name, value) for name, value in response.headers.raw_items() if name.lower() != REASON.encode()]
    return h11.Response(status_code=response.status_code, headers=headers, reason=phrase)


class ReasonProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with reason phrases from the application and a time limit for headers."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._has_part = False  # of a request's header
        limit = self.config.h11_max_incomplete_event_size
        self.conn = _Connection(h11.SERVER, **({} if limit is None else {"max_incomplete_event_size": limit}))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _probe_from_time_to_time(transport.get_extra_info("socket"))
        self._limit_the_wait()

    def data_received(self, data: bytes) -> None:
        # Taken away, so that uvicorn does not end the wait for a header with each piece of it.
        waiting, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        is_part = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if is_part and self._has_part:
            self.timeout_keep_alive_task = waiting
        elif waiting is not None:
            waiting.cancel()
        if is_part and not self._has_part:  # its first piece: the time begins anew
            self._limit_the_wait()
        self._has_part = is_part

    def _limit_the_wait(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)


def _probe_from_time_to_time(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
