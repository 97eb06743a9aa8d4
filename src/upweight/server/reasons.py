"""Reason phrases that say why: some clients show nothing else of a 401, 403, 409, 413 or 429.

ASGI has no place for a phrase. The application puts it into the header `REASON`, and this protocol, given to uvicorn as `http=`,
moves it from there to the status line.
"""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REASON = "x-reason"
LONGEST = 300  # characters


def reason_header(text: str) -> dict[str, str]:
    """The header for a reason phrase: one line of printable ASCII."""
    line = "".join(letter if " " <= letter <= "~" else "?" for letter in " ".join(text.split()))[:LONGEST]
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
    """uvicorn's HTTP/1.1 protocol with reason phrases from the application."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        limit = self.config.h11_max_incomplete_event_size
        self.conn = _Connection(h11.SERVER, **({} if limit is None else {"max_incomplete_event_size": limit}))
