"""Wire models of uploaded files."""

from __future__ import annotations

from upweight.api_client.models._base import WireModel


class File(WireModel):
    """An uploaded file; `bytes` is its size."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"


class FileListResponse(WireModel):
    data: list[File]
    has_more: bool = False
    object: str = "list"


class DeletedFile(WireModel):
    id: str
    deleted: bool
    object: str = "file"
