"""Load from a process of its own: uploads that were encoded before, over keep-alive connections; or status calls one by one.

    python -m benchmarks.server.load uploads URL KEY PATH --requests 6400 --samples 8 --tokens 512 --connections 100
    python -m benchmarks.server.load status URL KEY PATH --seconds 10

Prints JSON; `uploads` prints an empty line before, when all is encoded and the first request goes out. The client is bare sockets: an HTTP library would take more of the machine than the server.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit


def sample_text(tokens: int) -> tuple[bytes, bytes]:
    """What stands before and behind the id of a sample, as the SDK encodes it."""
    context = tokens // 4
    rest = {
        "token_ids": list(range(1000, 1000 + tokens)),
        "logprobs": [0.0] * context + [-0.123456789] * (tokens - context),
        "mask": [0] * context + [1] * (tokens - context),
        "normalized_reward": 0.5,
        "metadata": {},
        "debug_info": {"task_id": "t", "reward": 0.5},
    }
    text = json.dumps(rest, separators=(",", ":"))
    return b'{"object":"fine_tuning.rl_sample","id":"', b'",' + text[1:].encode()


def requests(url: str, key: str, path: str, count: int, samples: int, tokens: int) -> list[bytes]:
    before, behind = sample_text(tokens)
    made = []
    for number in range(count):
        one = b",".join(before + b"s%d-%d" % (number, i) + behind for i in range(samples))
        body = b'{"samples":[' + one + b"]}"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nIdempotency-Key: k{number}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


async def one_connection(url: str, queue: list[bytes]) -> None:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    while queue:
        writer.write(queue.pop())
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length"))
        body = await reader.readexactly(length)
        if b" 200 " not in lines[0]:
            raise SystemExit(f"{lines[0]!r}: {body[:300]!r}")
    writer.close()


async def send(url: str, made: list[bytes], connections: int) -> float:
    queue = made[::-1]
    began = time.perf_counter()
    await asyncio.gather(*(one_connection(url, queue) for _ in range(connections)))
    return time.perf_counter() - began


def uploads(options: argparse.Namespace) -> dict[str, Any]:
    made = requests(options.url, options.key, options.path, options.requests, options.samples, options.tokens)
    print(flush=True)
    seconds = asyncio.run(send(options.url, made, options.connections))
    samples = options.requests * options.samples
    return {
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "bytes": sum(map(len, made)),
    }


def status(options: argparse.Namespace) -> dict[str, Any]:
    place = urlsplit(options.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    took = []
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        connection.request("GET", options.path, headers={"Authorization": f"Bearer {options.key}"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"status answered {answer.status}")
        took.append(time.perf_counter() - began)
        time.sleep(0.02)
    took.sort()
    return {
        "calls": len(took),
        "p50_ms": 1000 * took[len(took) // 2],
        "p99_ms": 1000 * took[min(len(took) - 1, int(len(took) * 0.99))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["uploads", "status"])
    for name in ("url", "key", "path"):
        parser.add_argument(name)
    parser.add_argument("--requests", type=int, default=6400)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    print(json.dumps(uploads(options) if options.what == "uploads" else status(options)))


if __name__ == "__main__":
    main()
