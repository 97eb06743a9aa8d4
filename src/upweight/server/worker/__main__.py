"""`python -m upweight.server.worker SPEC.json`: one job's worker. Ends when its standard input does."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from upweight.errors import UpweightError
from upweight.server.worker_protocol import LOAD_FAILED, WorkerSpec

ENGINE_FAILED = 4


def main() -> None:
    spec = WorkerSpec.model_validate_json(Path(sys.argv[1]).read_bytes())
    faulthandler.register(signal.SIGUSR1)  # what it does now, into the log of its job
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    threading.Thread(target=_die_with_parent, name="parent", daemon=True).start()

    import uvicorn

    from upweight.inference.compilation_cache import use_compilation_cache
    from upweight.server.worker.app import make_app
    from upweight.server.worker.core import WorkerCore

    if spec.cache_folder:
        use_compilation_cache(spec.cache_folder)
    core = WorkerCore(spec)
    core.start()
    threading.Thread(target=_end_with_engine, args=(core,), name="engine-watch", daemon=True).start()
    uvicorn.run(
        make_app(core),
        uds=spec.socket,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,  # longer than clients keep idle connections: none is closed under a request
    )
    # Compilation and running steps hold threads that cannot be joined in bounded time.
    os._exit(0)


def _die_with_parent() -> None:
    """The parent holds the other end of standard input; whatever kills it closes that end."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def _end_with_engine(core: object) -> None:
    """A worker that cannot load, or whose engine gave up, ends: its supervisor starts another one."""
    from upweight.server.worker.core import WorkerCore

    assert isinstance(core, WorkerCore)
    try:
        core.wait_ready()
    except UpweightError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(LOAD_FAILED)
    except Exception:  # noqa: BLE001 - its traceback was logged where it was caught
        os._exit(1)
    if (why := core.engine.wait_for_end()) is not None:
        print(f"error: {why}", file=sys.stderr, flush=True)
        os._exit(ENGINE_FAILED)


if __name__ == "__main__":
    main()
