"""A resource knows its place in the URL; what it does stands in the subclasses."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol
from urllib.parse import quote

import httpx

from upweight.errors import ConfigError


class Client(Protocol):
    """What resources need of the client."""

    @property
    def base_url(self) -> str: ...
    def get(self, url: str, **kw: Any) -> httpx.Response: ...
    def post(self, url: str, **kw: Any) -> httpx.Response: ...
    def request(self, method: str, url: str, **kw: Any) -> httpx.Response: ...


class Resource:
    """A fixed place: `<parent>/<PATH_SEGMENT>`; without a parent, `<base_url>/<PATH_SEGMENT>`."""

    PATH_SEGMENT: ClassVar[str]

    def __init__(self, client: Client, parent: Resource | None = None) -> None:
        self._client = client
        self._parent = parent

    def endpoint(self) -> str:
        above = self._client.base_url if self._parent is None else self._parent.endpoint()
        return f"{above}/{self.PATH_SEGMENT}"


class JobCollection(Resource):
    """The jobs: `bare_endpoint()` is the collection, `endpoint(job_id=)` one job."""

    def bare_endpoint(self) -> str:
        return super().endpoint()

    def endpoint(self, *, job_id: str) -> str:  # type: ignore[override]
        if job_id in ("", ".", ".."):  # would be the path of something else
            raise ConfigError(f"job_id is {job_id!r}; give the id of a job")
        return f"{self.bare_endpoint()}/{quote(job_id, safe='')}"


class JobResource:
    """A place below one job: `<job>/<…>/<PATH_SEGMENT>`."""

    PATH_SEGMENT: ClassVar[str]

    def __init__(self, client: Client, parent: JobCollection | JobResource) -> None:
        self._client = client
        self._parent = parent

    def endpoint(self, *, job_id: str) -> str:
        return f"{self._parent.endpoint(job_id=job_id)}/{self.PATH_SEGMENT}"


def present(**params: Any) -> dict[str, Any]:
    """The query parameters that are given."""
    return {name: value for name, value in params.items() if value is not None}
