"""A job's life: HTTP API, store, worker (engine + trainer).

`run(settings)` serves until it is told to stop; `create_app(settings)` is the ASGI application alone. Both are imported on
use, so that the worker process, which lives below this package, does not pay for the HTTP stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upweight.server.api.app import create_app
    from upweight.server.process import run
    from upweight.server.settings import Settings, load_settings

__all__ = ["Settings", "create_app", "load_settings", "run"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from upweight.server.api.app import create_app

        return create_app
    if name == "run":
        from upweight.server.process import run

        return run
    if name in {"Settings", "load_settings"}:
        from upweight.server import settings

        return getattr(settings, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
