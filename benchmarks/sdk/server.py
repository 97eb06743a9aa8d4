"""A job server that costs next to nothing: asyncio, answers encoded beforehand, bodies counted but not read.

It trusts its client: what it counts is the number of `"id":` in a body. Run as `python -m benchmarks.sdk.server BATCH_SIZE`;
it prints its port.
"""

from __future__ import annotations

import asyncio
import json
import sys


class Job:
    """`uploads` counts upload requests, `samples` what they held; the version follows the filled batches."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.samples = self.uploads = self.bytes = 0

    def answer(self, line: bytes, body: bytes) -> bytes:
        if line.endswith(b"/samples HTTP/1.1"):
            self.samples += body.count(b'"fine_tuning.rl_sample"')
            self.uploads += 1
            self.bytes += len(body)
            return self._batch(self._named(line))
        if b"/status " in line:
            filled = self.samples // self.batch_size
            return (
                b'{"object":"fine_tuning.job.status","inference_version":%d,"total_batches":null,"filled_batches":%d}'
                % (
                    filled,
                    filled,
                )
            )
        if b"/counts " in line:
            return json.dumps(vars(self)).encode()
        return self._batch(self.samples // self.batch_size)

    def _named(self, line: bytes) -> int:
        return int(line.split(b"/batches/")[1].split(b"/")[0])

    def _batch(self, index: int) -> bytes:
        count = min(self.batch_size, max(0, self.samples - index * self.batch_size))
        status = b"filled" if count == self.batch_size else b"filling"
        return b'{"object":"fine_tuning.batch","index":%d,"status":"%s","sample_count":%d}' % (index, status, count)


async def serve(batch_size: int) -> None:
    job = Job(batch_size)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                return
            line, *fields = head.split(b"\r\n")
            lengths = [int(f.split(b":")[1]) for f in fields if f.lower().startswith(b"content-length:")]
            body = await reader.readexactly(lengths[0]) if lengths else b""
            answer = job.answer(line, body)
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
