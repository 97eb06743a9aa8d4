"""`python -m upweight.server`: the job server in the foreground."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from upweight.errors import UpweightError
from upweight.server.process import run
from upweight.server.settings import load_settings


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m upweight.server", description="Serve the job API.")
    parser.add_argument("--home", help="folder of store, jobs and logs (default: UPWEIGHT_HOME, else ~/.upweight)")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 = any free one (default: 8000)")
    parser.add_argument("--parent-pipe", action="store_true", default=None, help="stop when standard input ends")
    chosen: dict[str, Any] = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    try:
        run(load_settings(**chosen))
    except UpweightError as error:
        print(f"upweight server: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
