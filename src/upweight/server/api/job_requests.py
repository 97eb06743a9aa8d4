"""The request that creates a job: checked and reduced to what is kept. Fields that hold secrets are never kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upweight.errors import ModelError
from upweight.server.api.context import Parts
from upweight.server.home import model_bytes
from upweight.server.methods import Reinforcement, parse_method
from upweight.server.refusals import Refusal, invalid

KNOWN_FIELDS = frozenset(
    {"model", "training_file", "validation_file", "from_checkpoint", "hyperparameters", "method", "integrations"}
    | {"seed", "suffix", "tags", "extra_body", "ai_project_id"}
)
NOT_USED = ("hyperparameters", "integrations", "validation_file")  # known, but without effect on a reinforcement job
LONGEST_SUFFIX = 64
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class WantedJob:
    model: str
    reinforcement: Reinforcement
    kept: dict[str, Any]
    warnings: list[str]


def parse_request(request: dict[str, Any]) -> WantedJob:
    """Raises Refusal 422 naming field, value and remedy."""
    model = request.get("model")
    if not isinstance(model, str) or not model:
        raise invalid(("body", "model"), f"model = {model!r}: the name or folder of a model is needed", "missing")
    for field in ("training_file", "validation_file", "suffix"):
        if not isinstance(request.get(field), str | None):
            raise invalid(("body", field), f"{field} = {request[field]!r}: a text is needed")
    if len(request.get("suffix") or "") > LONGEST_SUFFIX:
        raise invalid(("body", "suffix"), f"suffix is longer than {LONGEST_SUFFIX} characters")
    if request.get("from_checkpoint") is not None:
        raise invalid(
            ("body", "from_checkpoint"), "from_checkpoint is not offered by this server yet; name a folder as model"
        )
    tags = request.get("tags")
    if tags is not None and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise invalid(("body", "tags"), "tags must be a list of texts")
    method = _method_of(request)
    kept = {name: request.get(name) for name in ("training_file", "validation_file", "suffix", "tags")}
    kept["training_file"] = kept["training_file"] or ""
    kept["unknown"] = {name: value for name, value in request.items() if name not in KNOWN_FIELDS}
    return WantedJob(model=model, reinforcement=method, kept=kept, warnings=_warnings(request))


def _method_of(request: dict[str, Any]) -> Reinforcement:
    nested = request.get("extra_body")
    inner = nested.get("method") if isinstance(nested, dict) else None
    outer = request.get("method")
    if outer is not None and inner is not None and outer != inner:
        raise invalid(("body", "method"), "method and extra_body.method differ; send one of them")
    method, loc = (outer, ("body", "method")) if outer is not None else (inner, ("body", "extra_body", "method"))
    if method is None:
        raise invalid(
            ("body", "method"),
            'method is missing; this server offers {"type": "reinforcement", "reinforcement": {"batch_size": …}}',
            "missing",
        )
    seed = request.get("seed")
    if isinstance(method, dict) and isinstance(settings := method.get("reinforcement"), dict) and seed is not None:
        method = {**method, "reinforcement": {"seed": seed, **settings}}
    return parse_method(method, loc=loc)


def _warnings(request: dict[str, Any]) -> list[str]:
    unknown = [f"unknown field {name!r} was ignored" for name in request if name not in KNOWN_FIELDS]
    unused = [f"field {name!r} has no effect on a reinforcement job" for name in NOT_USED if request.get(name)]
    return unknown + unused


async def resolve_model(parts: Parts, model: str) -> tuple[str, str]:
    """Absolute path of the model and what to call it. Raises Refusal 422 when it is not on this machine."""
    try:
        source = await asyncio.to_thread(parts.resolve_model, model)
    except ModelError as error:
        raise invalid(("body", "model"), str(error), "model_not_found") from error
    return str(Path(source.path).absolute()), getattr(source, "name", model)


async def refuse_without_room(parts: Parts, model_path: str, wanted: WantedJob) -> None:
    """Refuse (422) a job whose checkpoints and weights would not fit into the disk budget or the free space."""
    keep = wanted.reinforcement.keep_checkpoints
    full, used = await asyncio.gather(
        asyncio.to_thread(model_bytes, Path(model_path)), asyncio.to_thread(parts.home.bytes_used)
    )
    # A checkpoint holds parameters and two optimizer moments; one more exists while the next is written; then the export.
    per_checkpoint = full if wanted.reinforcement.lora else 3 * full
    needed = per_checkpoint * (keep + 1) + full
    budget, free = parts.settings.disk_budget_gb * GB - used, parts.home.bytes_free()
    if needed > min(budget, free):
        which, left = ("free disk space", free) if free < budget else ("disk budget UPWEIGHT_DISK_BUDGET_GB", budget)
        raise Refusal(
            422,
            f"the job needs about {needed / GB:.2f} GB for {keep} checkpoints and the result, {left / GB:.2f} GB are left of the {which};"
            f" lower keep_checkpoints, delete old jobs in {parts.home.jobs}, or raise the budget",
        )
