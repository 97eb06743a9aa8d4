"""JSON answers in pure ASCII: half a surrogate pair, which a client may send inside valid JSON, can be told back to it."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse


class AsciiJSON(JSONResponse):
    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
