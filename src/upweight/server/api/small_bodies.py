"""Bodies of orders: a few settings or numbers. They are read on the event loop, so none may be long enough to hold it up."""

from __future__ import annotations

from fastapi import Request

from upweight.server.refusals import Refusal

MOST = 256 * 1024  # bytes; parsed within milliseconds


async def read_small_body(request: Request) -> bytes:
    """The whole body. Raises Refusal 413 as soon as it is larger than `MOST`."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MOST:
            raise Refusal(
                413, f"the body is larger than {MOST // 1024} KiB, the limit of this route; is it meant for it?"
            )
        chunks.append(chunk)
    return b"".join(chunks)
