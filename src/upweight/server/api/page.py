"""The web page at `/`: files that lie in the package. They hold no data and need no key; what they show, they ask the API for.

Invariants: everything comes from this server (the content policy forbids all else), and a path names one of the listed files.
"""

from __future__ import annotations

import mimetypes
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from upweight import __version__
from upweight.server.refusals import not_found

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
TEXT = f"""upweight {__version__} job server

POST /v1/fine_tuning/jobs                             create a job
GET  /v1/fine_tuning/jobs                             list jobs
GET  /v1alpha1/fine_tuning/jobs/{{job_id}}/progress     how a job stands
GET  /v1alpha1/fine_tuning/jobs/{{job_id}}/waiting      what it waits for
POST /v1/chat/completions, /v1/completions            ask a job's model (OpenAI)
POST /v1/messages                                     ask a job's model (Anthropic)
GET  /v1/models, /stats, /metrics                     what is served, and how
GET  /openapi.json                                    all routes, for programs
GET  /healthz, /readyz, /health                       health of the process, the store, the engines

A browser shows the same as a page. All routes but this one, its document and health need the header 'Authorization: Bearer <key>'.
"""

router = APIRouter()


@router.head("/", include_in_schema=False)
@router.get("/")
async def front(request: Request) -> Response:
    """The page for a browser, a list of routes for everything else."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(TEXT)
    return _answer("index.html")


@router.get("/page/{name}")
async def file(name: str) -> Response:
    return _answer(name)


def _answer(name: str) -> Response:
    content = _files().get(name)
    if content is None:
        raise not_found("file", name)
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(content, media_type=kind, headers=HEADERS)


@cache
def _files() -> dict[str, bytes]:
    folder = files("upweight.server") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
