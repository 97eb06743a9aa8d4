"""What W&B wrote offline below a folder: `python tests/wandb_rows.py FOLDER` prints the history rows of its runs as JSON."""

import json
import struct
import sys
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, FILE_HEADER, HEADER = 32768, 7, 7  # bytes, of LevelDB's log format


def history(path: Path) -> list[dict]:
    rows = []
    data, at, whole = path.read_bytes(), FILE_HEADER, b""
    assert data.startswith(b":W&B")
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


if __name__ == "__main__":
    runs = sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb"))
    print(json.dumps([row for run in runs for row in history(run)]))
