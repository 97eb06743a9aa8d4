"""The files of the web page, over HTTP. What they do in a browser is tested in test_page_in_a_browser."""

from __future__ import annotations

import re

import httpx
import pytest
from server_harness import Running

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def get(server: Running, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{str(server.http.base_url).rstrip('/')}{path}", headers=headers)


def test_a_browser_gets_the_page_without_a_key_and_a_program_the_routes(shared: Running) -> None:
    page = get(shared, "/", **BROWSER)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert get(shared, "/").text.startswith("upweight ")
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


def test_all_that_the_page_names_is_there_and_nothing_lies_elsewhere(shared: Running) -> None:
    seen, wanted = set(), {"/"}
    while wanted - seen:
        path = min(wanted - seen)
        seen.add(path)
        answer = get(shared, path, **BROWSER)
        assert answer.status_code == 200, path
        assert answer.headers["x-content-type-options"] == "nosniff"
        if path.endswith((".min.js", ".css", ".svg")):
            continue
        assert not re.findall(r"""(?:src|href|from|fetch\()\s*=?\s*["'](?:https?:)?//""", answer.text), path
        wanted |= {f"/{name}" for name in re.findall(r'(?:src|href)="(page/[^"]+)"', answer.text)}
        wanted |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', answer.text)}
    assert len(seen) > 8


@pytest.mark.parametrize("name", ["..%2fapp.py", "%2e%2e", "app.py", "__init__.py", "no.js", "%00", "index.html%00.js"])
def test_nothing_but_the_files_of_the_page_is_given(shared: Running, name: str) -> None:
    assert get(shared, f"/page/{name}").status_code == 404
