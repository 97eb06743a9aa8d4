"""A server process with the fake worker: `serve_fake.py HOME [key=value …]` (settings as JSON)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from server_harness import fake_settings, resolve_fake

from upweight.errors import UpweightError
from upweight.server import run

if __name__ == "__main__":
    given = dict(pair.split("=", 1) for pair in sys.argv[2:])
    more = {name: json.loads(value) for name, value in given.items()}
    behaviour = more.pop("behaviour", None)
    settings = fake_settings(Path(sys.argv[1]), behaviour)
    try:
        run(settings.model_copy(update=more), resolve_model=resolve_fake)
    except UpweightError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    print("jax" in sys.modules, flush=True)  # what the test of imports reads
