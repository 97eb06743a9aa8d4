"""Answers of a server as the documents that the commands print: one that has another shape is told in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from upweight.errors import ServerError

if TYPE_CHECKING:
    import httpx

JOB = ("id", "status", "created_at", "model")
PROGRESS: tuple[str, ...] = (
    "job_status",
    "reason",
    "error",
    "inference_version",
    "filled_batches",
    "total_batches",
    "batch_size",
)
PROGRESS += ("in_batch", "versions", "client_metrics", "ledger", "weights", "worker")
CHECKPOINT = ("id", "created_at", "step_number", "metrics")
MODEL = ("id", "name", "path")


def document(response: httpx.Response, fields: tuple[str, ...]) -> dict[str, Any]:
    """The object in the body. Raises ServerError when it lacks one of `fields`."""
    return _checked(response, response.json(), fields)


def page(response: httpx.Response, fields: tuple[str, ...]) -> dict[str, Any]:
    """A page of a list, each item with `fields`."""
    found = document(response, ("data", "has_more"))
    if not isinstance(found["data"], list):
        raise _unknown(response, "data is no list")
    for item in found["data"]:
        _checked(response, item, fields)
    return found


def _checked(response: httpx.Response, value: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unknown(response, f"an object is expected, it is {type(value).__name__}")
    if missing := [name for name in fields if name not in value]:
        raise _unknown(response, f"{', '.join(missing)} missing")
    return value


def _unknown(response: httpx.Response, why: str) -> ServerError:
    return ServerError(
        f"{response.request.url} answered what this command cannot read ({why}): is it an upweight server?"
    )
