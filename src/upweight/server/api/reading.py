"""Large uploads are read by a process of their own: their numbers take no time from calls that wait for the event loop.

Invariants:
* A reading process ends with its server, however that ends: it lives as long as the other end of its socket.
* What a process that died was reading is read once more by a new one, so an upload fails only if it kills two.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
import sys

from upweight.errors import ServerError
from upweight.server.refusals import Refusal
from upweight.server.store.rows import NewSample

HEADER = struct.Struct("<Q?")  # length of a body, and whether its samples must name their groups
LENGTH = struct.Struct("<Q")
STOP_SECONDS = 5.0


class UploadReader:
    """One reading process, started by the first upload."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def read(self, body: bytes, needs_task: bool) -> list[NewSample]:
        """As `parse_upload`. Raises Refusal 422, ServerError when the process dies of it."""
        async with self._turn:
            for _ in range(2):
                try:
                    answer = await self._ask(body, needs_task)
                except (OSError, EOFError):
                    await self.close()
                    continue
                except BaseException:  # half an answer may be under way
                    await self.close()
                    raise
                if isinstance(answer, tuple):
                    raise Refusal(*answer)
                return answer
        raise ServerError("the process that reads uploads died twice of one upload; send fewer samples per request")

    async def close(self) -> None:
        """Idempotent."""
        process, streams = self._process, self._streams
        self._process = self._streams = None
        if streams is not None:
            streams[1].close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait_for(process.wait(), STOP_SECONDS)

    async def _ask(self, body: bytes, needs_task: bool) -> list[NewSample] | tuple[int, list[dict]]:
        reader, writer = self._streams or await self._start()
        writer.write(HEADER.pack(len(body), needs_task))
        writer.write(body)
        await writer.drain()
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        answer: list[NewSample] | tuple[int, list[dict]] = pickle.loads(await reader.readexactly(length))
        return answer

    async def _start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        mine, other = socket.socketpair()
        try:
            with other:
                command = [sys.executable, "-m", "upweight.server.api.reading", str(other.fileno())]
                # A session of its own: Ctrl-C in a terminal is for the server.
                self._process = await asyncio.create_subprocess_exec(
                    *command, pass_fds=[other.fileno()], start_new_session=True
                )
            self._streams = await asyncio.open_connection(sock=mine)
        except BaseException:  # a cancelled start too leaves no socket open
            mine.close()
            raise
        return self._streams


def serve(channel: socket.socket) -> None:
    """Read uploads from `channel` until its other end is closed."""
    from upweight.server.api.uploads import parse_upload

    with channel, channel.makefile("rwb") as stream:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            length, needs_task = HEADER.unpack(header)
            try:
                answer: object = parse_upload(stream.read(length), needs_task)
            except Refusal as refused:
                answer = refused.status, refused.detail
            told = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
            stream.write(LENGTH.pack(len(told)) + told)
            stream.flush()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
