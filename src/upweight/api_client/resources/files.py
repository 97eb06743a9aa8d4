"""Uploaded files: what `training_file` and `validation_file` name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from upweight.api_client._responses import parse
from upweight.api_client.models.files import DeletedFile, File, FileListResponse
from upweight.api_client.resources._base import Resource, present

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

    def list(
        self, *, limit: int | None = None, after: str | None = None, purpose: str | None = None
    ) -> FileListResponse:
        """Newest first; `after` is the id of the last one already seen."""
        query = present(limit=limit, after=after, purpose=purpose)
        return parse(FileListResponse, self._client.get(self.endpoint(), params=query))

    def iterate(self, *, purpose: str | None = None) -> Iterator[File]:
        """All files, page by page."""
        after = None
        while True:
            page = self.list(after=after, purpose=purpose)
            yield from page.data
            if not page.has_more or not page.data:
                return
            after = page.data[-1].id

    def content(self, *, file_id: str) -> bytes:
        response = self._client.get(f"{self.endpoint()}/{file_id}/content", timeout=UPLOAD_TIMEOUT_S)
        return response.content

    def delete(self, *, file_id: str) -> DeletedFile:
        return parse(DeletedFile, self._client.request("DELETE", f"{self.endpoint()}/{file_id}"))
