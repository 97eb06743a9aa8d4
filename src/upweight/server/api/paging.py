"""How much of a list a request gets."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

Limit = Annotated[int, Query(ge=1, le=100)]
DEFAULT_LIMIT = 20
