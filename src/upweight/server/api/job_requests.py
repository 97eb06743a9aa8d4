"""The request that creates a job: checked and reduced to what is kept. Fields that hold secrets are never kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upweight.errors import ModelError
from upweight.server.api.context import Parts
from upweight.server.api.origins import check_shape
from upweight.server.file_methods import FILE_TYPES, FileMethod, parse_file_method
from upweight.server.home import model_bytes
from upweight.server.integrations import Integration, parse_integrations
from upweight.server.methods import LARGEST, Reinforcement, parse_method
from upweight.server.refusals import Refusal, invalid
from upweight.server.store import models

KNOWN_FIELDS = frozenset(
    {"model", "training_file", "validation_file", "from_checkpoint", "hyperparameters", "method", "integrations"}
    | {"seed", "suffix", "tags", "extra_body", "ai_project_id"}
)
LONGEST_SUFFIX = 64
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class WantedJob:
    model: str
    method: Reinforcement | FileMethod
    kept: dict[str, Any]
    integrations: list[Integration]
    from_checkpoint: dict[str, Any] | None
    warnings: list[str]


def parse_request(request: dict[str, Any], *, local_tracking: bool = False) -> WantedJob:
    """`local_tracking`: whether its trackers may write to this machine. Raises Refusal 422 naming field, value and remedy."""
    model = request.get("model")
    if not isinstance(model, str) or not model:
        raise invalid(("body", "model"), f"model = {model!r}: the name or folder of a model is needed", "missing")
    for field in ("training_file", "validation_file", "suffix"):
        if not isinstance(request.get(field), str | None):
            raise invalid(("body", field), f"{field} = {request[field]!r}: a text is needed")
    if len(request.get("suffix") or "") > LONGEST_SUFFIX:
        raise invalid(("body", "suffix"), f"suffix is longer than {LONGEST_SUFFIX} characters")
    check_shape(request.get("from_checkpoint"))
    tags = request.get("tags")
    if tags is not None and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise invalid(("body", "tags"), "tags must be a list of texts")
    method = _method_of(request)
    kept = {name: request.get(name) for name in ("training_file", "validation_file", "suffix", "tags")}
    kept["training_file"] = kept["training_file"] or ""
    method_type = method.type if isinstance(method, FileMethod) else "reinforcement"
    kept["method_type"] = method_type
    integrations = parse_integrations(request.get("integrations"), local_tracking=local_tracking)
    kept["integrations"] = [one.answer for one in integrations]
    kept["unknown"] = {name: value for name, value in request.items() if name not in KNOWN_FIELDS}
    return WantedJob(
        model=model,
        method=method,
        kept=kept,
        integrations=integrations,
        from_checkpoint=request.get("from_checkpoint"),
        warnings=_warnings(request, method_type),
    )


def _method_of(request: dict[str, Any]) -> Reinforcement | FileMethod:
    nested = request.get("extra_body")
    inner = nested.get("method") if isinstance(nested, dict) else None
    outer = request.get("method")
    if outer is not None and inner is not None and outer != inner:
        raise invalid(("body", "method"), "method and extra_body.method differ; send one of them")
    method, loc = (outer, ("body", "method")) if outer is not None else (inner, ("body", "extra_body", "method"))
    if method is None and request.get("training_file"):
        method = {"type": "supervised"}  # what the contract means by a file without a method
    if method is None:
        raise invalid(
            ("body", "method"),
            'method is missing; this server offers {"type": "reinforcement", "reinforcement": {"batch_size": …}}',
            "missing",
        )
    seed = request.get("seed")
    if isinstance(method, dict) and method.get("type") in FILE_TYPES:
        return parse_file_method(_with_hyperparameters(request, method), _seed(seed), loc=loc)
    if isinstance(method, dict) and isinstance(settings := method.get("reinforcement"), dict) and seed is not None:
        method = {**method, "reinforcement": {"seed": seed, **settings}}
    return parse_method(method, loc=loc)


def _seed(seed: object) -> int | None:
    if seed is None or (isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= LARGEST):
        return seed
    raise invalid(("body", "seed"), f"seed = {seed!r}: an integer from 0 to {LARGEST} is needed")


def _with_hyperparameters(request: dict[str, Any], method: dict[str, Any]) -> dict[str, Any]:
    """A supervised method with those of the request's own field, which clients without a method object use."""
    given, outer = request.get("hyperparameters"), method.get("supervised")
    if given is None or method["type"] != "supervised" or not isinstance(outer, dict | None):
        return method
    inner = (outer or {}).get("hyperparameters")
    if inner is not None and inner != given:
        raise invalid(("body", "hyperparameters"), "hyperparameters and those of the method differ; send one of them")
    return {**method, "supervised": {**(outer or {}), "hyperparameters": given}}


def _warnings(request: dict[str, Any], method_type: str) -> list[str]:
    unknown = [f"unknown field {name!r} was ignored" for name in request if name not in KNOWN_FIELDS]
    names: tuple[str, ...] = () if method_type == "supervised" else ("hyperparameters",)
    names = ("validation_file", *names) if method_type == "reinforcement" else names
    unused = [f"field {name!r} has no effect on a {method_type} job" for name in names if request.get(name)]
    return unknown + unused


async def resolve_model(parts: Parts, project: str, model: str) -> tuple[str, str]:
    """Absolute path of the model and what to call it: one that was promoted here, or one on this machine. Raises Refusal 422."""
    if (promoted := await parts.database.read(lambda c: models.find_model(c, project, model))) is not None:
        return promoted.path, promoted.name
    try:
        source = await asyncio.to_thread(parts.resolve_model, model)
    except ModelError as error:
        raise invalid(("body", "model"), str(error), "model_not_found") from error
    return str(Path(source.path).absolute()), getattr(source, "name", model)


async def refuse_without_room(
    parts: Parts, model_path: str, settings: dict[str, Any], *, with_start: bool = False
) -> None:
    """Refuse (422) a job whose checkpoints and weights would not fit into the disk budget or the free space.

    `with_start`: it has a start model of its own besides.
    """
    keep = settings["keep_checkpoints"]
    full, used = await asyncio.gather(
        asyncio.to_thread(model_bytes, Path(model_path)), asyncio.to_thread(parts.home.bytes_used)
    )
    # A checkpoint holds parameters and two optimizer moments; one more exists while the next is written; then the export.
    per_checkpoint = full if settings["lora"] else 3 * full
    needed = per_checkpoint * (keep + 1) + full * (1 + with_start)
    budget, free = parts.settings.disk_budget_gb * GB - used, parts.home.bytes_free()
    if needed > min(budget, free):
        which, left = ("free disk space", free) if free < budget else ("disk budget UPWEIGHT_DISK_BUDGET_GB", budget)
        raise Refusal(
            422,
            f"the job needs about {needed / GB:.2f} GB for {keep} checkpoints and the result, {left / GB:.2f} GB are left of the {which};"
            f" lower keep_checkpoints, delete old jobs in {parts.home.jobs}, or raise the budget",
        )
