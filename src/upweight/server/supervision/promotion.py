"""The weights of a checkpoint as a model folder, written by a worker of its own that lives only for this.

Invariant: a folder that appears under its name holds weights whose fingerprint is the one recorded for the version.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path

from upweight.server.home import Home, sync_folder
from upweight.server.refusals import Refusal
from upweight.server.settings import Settings
from upweight.server.store.jobs import Job
from upweight.server.supervision.specs import log_file, worker_spec
from upweight.server.supervision.worker_process import WorkerDied, WorkerRefused, start_worker
from upweight.server.worker_protocol import ExportResult, WorkerMode

CANNOT_WRITE = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES))


async def export_checkpoint(
    job: Job, checkpoint: str, fingerprint: str, folder: Path, home: Home, settings: Settings
) -> None:
    """Write the model at `checkpoint` to `folder`.

    Raises Refusal: 503 when it cannot be loaded or exported, 507 when it cannot be written, 409 when it is another model.
    """
    # All that a worker writes lies in here, also what it leaves when it is killed.
    aside = folder.with_name(f".{folder.name}.partial")
    await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)  # of a server that was killed
    spec = worker_spec(job, home, WorkerMode.SERVE, checkpoint, settings)
    worker = await start_worker(settings.worker_command, spec, log_file(home, job.id), home.run)
    try:
        state = await worker.wait_until_ready(settings.worker_start_timeout, settings.worker_silence_timeout)
        if state.fingerprint != fingerprint:
            raise Refusal(409, f"the checkpoint {checkpoint} holds other weights than those of its version")
        await worker.order("/export", ExportResult, json={"path": str(aside / "model")})
        (aside / "model").replace(folder)
        await asyncio.to_thread(sync_folder, folder.parent)
    except (WorkerDied, WorkerRefused) as error:
        status = 507 if any(reason in str(error) for reason in CANNOT_WRITE) else 503
        raise Refusal(status, f"the checkpoint could not be exported: {worker.why_not_loaded or error}") from error
    finally:
        await worker.stop(settings.worker_stop_timeout)
        await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
