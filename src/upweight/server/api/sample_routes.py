"""`/v1alpha1/fine_tuning/jobs/{job_id}/samples` and `/staleness`: what the rollouts of a job say, for the web page and for people."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy import Row

from upweight.errors import UpweightError
from upweight.server.api.context import JobOf, PartsOf
from upweight.server.sample_views import histogram, matches, short_view, whole_view
from upweight.server.store import samples
from upweight.server.store.jobs import Job
from upweight.server.store.versions import FATES, UNTRAINED

if TYPE_CHECKING:
    from upweight.tokenizer import Tokenizer

SEARCHED = 1000  # samples that one call looks through at most
COUNTED = 2000  # newest samples in the histogram of staleness

router = APIRouter(prefix="/v1alpha1/fine_tuning/jobs/{job_id}")

Limit = Annotated[int, Query(ge=1, le=200)]
Index = Annotated[int | None, Query(ge=0, le=2**31 - 1)]
Words = Annotated[str, Query(max_length=200)]
Fate = Annotated[str, Query(pattern=f"^({'|'.join((*FATES, UNTRAINED))})?$")]


@router.get("/samples")
async def list_samples(
    job: JobOf,
    parts: PartsOf,
    limit: Limit = 50,
    after: str | None = None,
    batch: Index = None,
    fate: Fate = "",
    search: Words = "",
) -> dict[str, Any]:
    """Newest batch first. A search looks through a window of samples: `next` goes on behind it, null at the end."""
    place = samples.Place.parse(after) if after else None
    tokenizer = await _tokenizer_of(job)
    wanted = _condition(fate, search.lower(), tokenizer)
    window = SEARCHED if fate or search else limit

    def look(connection: Any) -> dict[str, Any]:
        rows = samples.window(connection, job.id, rows=window, after=place, batch=batch)
        found: list[Row] = []
        seen = 0
        for row in rows:
            seen += 1
            if wanted(row):
                found.append(row)
            if len(found) == limit:
                break
        ended = seen == len(rows) < window
        return {
            "object": "list",
            "data": [short_view(row, tokenizer) for row in found],
            "searched": seen,
            "next": None if ended or not rows else str(samples.place_of(rows[seen - 1])),
        }

    return await parts.database.read(look)


@router.get("/samples/{sample_id:path}")
async def get_sample(sample_id: str, job: JobOf, parts: PartsOf) -> dict[str, Any]:
    row = await parts.database.read(lambda c: samples.get_sample(c, job.id, sample_id))
    return whole_view(row, await _tokenizer_of(job))


@router.get("/staleness")
async def get_staleness(job: JobOf, parts: PartsOf, batch: Index = None) -> dict[str, Any]:
    """Counts of samples by staleness, of one batch or of the newest samples."""
    return await parts.database.read(lambda c: histogram(samples.window(c, job.id, rows=COUNTED, batch=batch)))


def _condition(fate: str, words: str, tokenizer: Tokenizer | None) -> Callable[[Row], bool]:
    def holds(row: Row) -> bool:
        return (not fate or (row.fate or UNTRAINED) == fate) and (not words or matches(row, words, tokenizer))

    return holds


async def _tokenizer_of(job: Job) -> Tokenizer | None:
    """None if the model's files are not there any more or cannot be read: then ids are shown."""
    try:
        return await asyncio.to_thread(_read_tokenizer, job.model_path)
    except UpweightError:
        return None


@lru_cache(maxsize=4)
def _read_tokenizer(path: str) -> Tokenizer:
    from upweight.weights.config import read_tokenizer
    from upweight.weights.source import resolve

    return read_tokenizer(resolve(path))
