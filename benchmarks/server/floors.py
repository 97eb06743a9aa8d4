"""The floors of an upload: a server that reads a body and answers, and a database that takes the same rows.

python -m benchmarks.server.floors echo PORT_FILE          # serves until killed, on the protocol stack of the real server
python -m benchmarks.server.floors rows FOLDER --samples 12800 --tokens 512
"""

from __future__ import annotations

import argparse
import json
import socket
import sqlite3
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from upweight.server.ascii_json import AsciiJSON
from upweight.server.reasons import ReasonProtocol
from upweight.server.store import schema
from upweight.server.store.rows import NewSample, pack_sample

ROWS_PER_COMMIT = 800  # what 100 runners with 8 samples each can have under way


def echo(port_file: str) -> None:
    app = FastAPI(default_response_class=AsciiJSON, openapi_url=None)

    @app.post("/{path:path}")
    async def take(request: Request) -> dict[str, Any]:
        return {"bytes": len(await request.body())}

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    Path(port_file).write_text(str(listener.getsockname()[1]))
    uvicorn.Server(uvicorn.Config(app, http=ReasonProtocol, log_level="warning", access_log=False)).run([listener])


def packed(id: str, tokens: int) -> NewSample:
    context = tokens // 4
    return pack_sample(
        id=id,
        token_ids=list(range(1000, 1000 + tokens)),
        logprobs=[0.0] * context + [-0.123456789] * (tokens - context),
        mask=[0] * context + [1] * (tokens - context),
        reward=0.5,
        metadata={},
        debug_info={"task_id": "t", "reward": 0.5},
    )


def insert_rows(path: Path, job_id: str, count: int, tokens: int, *, per_batch: int, per_commit: int) -> float:
    """Raw `executemany` into the table of samples; seconds without the making of the rows."""
    one = {**asdict(packed("", tokens)), "job_id": job_id}
    one |= {name: json.dumps(one[name]) for name in ("metadata", "debug_info")}
    names = [*one, "batch_index"]
    statement = f"INSERT INTO samples ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})"
    seconds = 0.0
    connection = sqlite3.connect(path)
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "temp_store=MEMORY", "cache_size=-32000"):
        connection.execute(f"PRAGMA {pragma}")
    for start in range(0, count, per_commit):
        rows = [
            {**one, "id": f"s{number}", "batch_index": number // per_batch}
            for number in range(start, min(count, start + per_commit))
        ]
        began = time.perf_counter()
        with connection:
            connection.executemany(statement, rows)
        seconds += time.perf_counter() - began
    connection.close()
    return seconds


def rows(folder: Path, samples: int, tokens: int) -> dict[str, Any]:
    path = folder / "floor.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute(str(CreateTable(schema.samples).compile(dialect=sqlite.dialect())))
        for index in schema.samples.indexes:
            connection.execute(str(CreateIndex(index).compile(dialect=sqlite.dialect())))
    seconds = insert_rows(path, "job", samples, tokens, per_batch=samples, per_commit=ROWS_PER_COMMIT)
    return {"samples": samples, "rows_per_commit": ROWS_PER_COMMIT, "samples_per_second": samples / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["echo", "rows"])
    parser.add_argument("place")
    parser.add_argument("--samples", type=int, default=12800)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    if options.what == "echo":
        echo(options.place)
    else:
        print(json.dumps(rows(Path(options.place), options.samples, options.tokens)))


if __name__ == "__main__":
    main()
