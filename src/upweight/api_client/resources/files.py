"""Uploaded files: what `training_file` and `validation_file` name."""

from __future__ import annotations

from pathlib import Path

from upweight.api_client._responses import parse
from upweight.api_client.models.files import File
from upweight.api_client.resources._base import Resource

UPLOAD_TIMEOUT_S = 600.0


class Files(Resource):
    PATH_SEGMENT = "files"

    def create(self, *, file: str | Path | tuple[str, bytes], purpose: str = "fine-tune") -> File:
        """Upload a file, given by its path or as (name, content)."""
        name, content = file if isinstance(file, tuple) else (Path(file).name, Path(file).read_bytes())
        response = self._client.post(
            self.endpoint(),
            files={"file": (name, content, "application/octet-stream")},
            data={"purpose": purpose},
            timeout=UPLOAD_TIMEOUT_S,
        )
        return parse(File, response)

    def get(self, *, file_id: str) -> File:
        return parse(File, self._client.get(f"{self.endpoint()}/{file_id}"))
