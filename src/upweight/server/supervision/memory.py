"""How many tokens a trainer may hold at once, from the memory that is free when a job starts; and what a job needs, by estimate.

Invariant: jobs that run together need no more memory, by estimate, than there is. A job that runs alone is never held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from upweight.server.home import model_bytes
from upweight.server.store.jobs import Job
from upweight.server.waiting import FOR_MEMORY

FEWEST, MOST = 512, 8192
USABLE = 0.7  # of the free memory; the rest is for the engine's cache, compilation and neighbours
BYTES_PER_TOKEN = 512 * 1024  # activations of small models with rematerialisation, and a share of the logits
COPIES_FULL, COPIES_LORA = 5, 2  # parameters old and new, gradient, two moments; base and merged


def microbatch_tokens(free_bytes: int, model_path: Path, *, lora: bool, keeps_start: bool = False) -> int:
    """A power of two from 512 to 8192. `keeps_start`: the start model is held beside the one that is trained."""
    held = _weight_bytes(model_path, lora=lora, keeps_start=keeps_start)
    fitting = int((free_bytes * USABLE - held) / BYTES_PER_TOKEN)
    return max(FEWEST, min(MOST, 1 << max(fitting, 1).bit_length() - 1))


def keeps_start(method_type: str, settings: Mapping[str, Any]) -> bool:
    """Whether a job's trainer holds the start model beside the one that it trains: for a KL, or as the reference of pairs."""
    if method_type == "reinforcement":
        return bool(settings["beta"] > 0)
    return method_type == "dpo" and settings["loss_type"] != "simpo"


def job_bytes(job: Job) -> int:
    """What the worker of a job will hold, by estimate: weights, optimizer, activations."""
    lora, tokens = job.settings["lora"] is not None, job.settings["microbatch_tokens"] or FEWEST
    kept = keeps_start(job.method_type, job.settings)
    return _weight_bytes(Path(job.model_path), lora=lora, keeps_start=kept) + tokens * BYTES_PER_TOKEN


def shortage(needed: int, others: Iterable[tuple[int, int]], *, free: int, limit: int | None) -> str | None:
    """Why a job that needs `needed` bytes has to wait, in words; None if it fits beside the others.

    `others`: (estimate, held now) of each worker that stays. `free`: memory of the machine that nobody holds, of which
    a share stays free. With a `limit` that is what all may need together, whatever is free.
    """
    grown = [(max(estimate, held), held) for estimate, held in others]
    if not grown:
        return None
    if limit is not None:
        room = limit - sum(most for most, _ in grown)
    else:
        room = int(free * USABLE) - sum(most - held for most, held in grown)
    if needed <= room:
        return None
    return f"{FOR_MEMORY}: it needs about {needed / 1e9:.2f} GB, {max(0, room) / 1e9:.2f} GB are left"


def _weight_bytes(model_path: Path, *, lora: bool, keeps_start: bool) -> int:
    return model_bytes(model_path) * (COPIES_LORA if lora else COPIES_FULL + int(keeps_start))
