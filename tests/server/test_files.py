"""`/v1/files` with the openai client and ours: a real server, real HTTP."""

from __future__ import annotations

import io
from collections.abc import Iterator

import httpx
import openai
import pytest
from server_harness import KEY, Running, Start

from upweight.api_client import TokenFactory
from upweight.server.store import keys
from upweight.server.store.database import Database

CONTENT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\r\n'


@pytest.fixture
def client(shared: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.http.base_url}".rstrip("/") + "/v1", api_key=KEY, max_retries=0) as one:
        yield one


def left_over(server: Running) -> set[str]:
    """Files in the home folder that the server does not list."""
    listed = {file["id"] for file in server.http.get("/v1/files").json()["data"]}
    return {path.name for path in (server.home / "files").iterdir()} - listed


def test_the_openai_client_stores_reads_and_deletes_a_file(shared: Running, client: openai.OpenAI) -> None:
    made = client.files.create(file=("train.jsonl", CONTENT), purpose="fine-tune")
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(CONTENT), "train.jsonl", "fine-tune")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == CONTENT
    assert made.id in [file.id for file in client.files.list(purpose="fine-tune")]
    assert made.id not in [file.id for file in client.files.list(purpose="batch")]
    assert client.files.delete(made.id).deleted
    assert not (shared.home / "files" / made.id).exists()
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            call(made.id)


def test_lists_follow_a_cursor_in_both_orders(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{i}.jsonl", b"x"), purpose="evals").id for i in range(3)]
    assert [file.id for file in client.files.list(limit=2, purpose="evals")] == made[::-1]  # two pages
    assert [file.id for file in client.files.list(limit=1, order="asc", after=made[0], purpose="evals")] == made[1:]
    page = client.files.list(limit=2, purpose="evals")
    assert (len(page.data), page.has_more) == (2, True)
    with pytest.raises(openai.NotFoundError, match="'file-none' does not exist"):
        client.files.list(after="file-none")


def test_our_own_client_uploads_too(shared: Running) -> None:
    with TokenFactory(f"{shared.http.base_url}".rstrip("/"), KEY) as ours:
        made = ours.v1.files.create(file=("a.jsonl", CONTENT))
        assert ours.v1.files.get(file_id=made.id).bytes == len(CONTENT)
        assert ours.v1.files.content(file_id=made.id) == CONTENT
        other = ours.v1.files.create(file=("b.jsonl", CONTENT), purpose="assistants")
        assert [file.id for file in ours.v1.files.iterate(purpose="assistants")] == [other.id]
        assert ours.v1.files.list(limit=1).has_more
        assert ours.v1.files.delete(file_id=made.id).deleted


def test_a_large_file_arrives_byte_for_byte(shared: Running, client: openai.OpenAI) -> None:
    body = bytes(range(256)) * 20_000  # 5 MB, with every byte and what looks like a boundary
    made = client.files.create(file=("large.bin", io.BytesIO(body + b"\r\n--boundary--\r\n")), purpose="user_data")
    assert client.files.content(made.id).read() == body + b"\r\n--boundary--\r\n"


def test_a_repeated_upload_is_stored_once(shared: Running) -> None:
    def send(content: bytes) -> httpx.Response:
        form = {"files": {"file": ("a", content)}, "data": {"purpose": "batch"}}
        return shared.http.post("/v1/files", headers={"Idempotency-Key": "upload-1"}, **form)

    first, second = send(b"same"), send(b"same")
    assert first.json() == second.json()
    assert send(b"other").status_code == 422
    assert left_over(shared) == set()


@pytest.mark.parametrize(
    ("request_parts", "status", "words"),
    [
        ({"json": {"purpose": "fine-tune"}}, 422, "must be multipart/form-data"),
        ({"files": {"file": ("a", b"x")}}, 422, "purpose is missing"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fun"}}, 422, "purpose = 'fun' is unknown; known: fine-tune"),
        ({"files": {"data": ("a", b"x")}, "data": {"purpose": "batch"}}, 422, "file is missing"),
        ({"files": [("file", ("a", b"x")), ("file", ("b", b"x"))]}, 422, "more than one file"),
        ({"files": {"text": ("a", b"x" * 70_000)}}, 422, "form field 'text' is too long"),
        ({"content": b"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nhalf",
          "headers": {"content-type": "multipart/form-data; boundary=b"}}, 422, "ends before its last boundary"),
        ({"content": b"rubbish", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 422, "form cannot be read"),
    ],
)  # fmt: skip
def test_refused_forms_leave_nothing(shared: Running, request_parts: dict, status: int, words: str) -> None:
    answer = shared.http.post("/v1/files", **request_parts)
    assert answer.status_code == status
    assert words in str(answer.json()["detail"])
    assert left_over(shared) == set()


def test_a_file_that_is_too_large_is_refused_while_it_arrives(start: Start) -> None:
    server = start(max_file_mb=1)
    told = server.http.post("/v1/files", files={"file": ("a", b"x" * 2_100_000)}, data={"purpose": "batch"})
    assert (told.status_code, told.json()["detail"]) == (413, "the file is larger than 1 MB; split it")

    def untold() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        yield from (b"x" * 100_000 for _ in range(11))

    headers = {"content-type": "multipart/form-data; boundary=b"}
    assert server.http.post("/v1/files", content=untold(), headers=headers).status_code == 413
    assert left_over(server) == set()


def test_files_survive_a_restart_and_remains_of_a_kill_do_not(start: Start) -> None:
    server = start()
    made = server.http.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"}).json()
    (server.home / "files" / ".upload-half").write_bytes(b"x")
    (server.home / "files" / "file-nameless").write_bytes(b"x")
    server.stop()
    again = start()
    assert again.http.get(f"/v1/files/{made['id']}").json() == made
    assert left_over(again) == set()


def test_names_are_plain_text_and_paths_are_not_followed(shared: Running) -> None:
    form = {"files": {"file": ("../../etc/\tpass\r\nwd.jsonl", b"x")}, "data": {"purpose": "batch"}}
    made = shared.http.post("/v1/files", **form).json()
    assert "/" not in made["filename"]
    assert made["filename"].isprintable()
    assert shared.http.get("/v1/files/..%2Fapi_key/content").status_code == 404


def test_a_file_belongs_to_its_project(start: Start) -> None:
    server = start()
    made = server.http.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"}).json()
    server.stop()
    store = Database(server.home / "store.sqlite3")
    store.submit(lambda c: keys.add_key(c, "uw-other", "other")).result()
    store.close()
    again = start()
    other = {"Authorization": "Bearer uw-other"}
    assert again.http.get("/v1/files", headers=other).json()["data"] == []
    for path in ("", "/content"):
        assert again.http.get(f"/v1/files/{made['id']}{path}", headers=other).status_code == 404
    assert again.http.delete(f"/v1/files/{made['id']}", headers=other).status_code == 404
    assert again.http.get(f"/v1/files/{made['id']}/content").content == b"x"


def test_a_file_whose_content_cannot_be_removed_is_deleted_all_the_same(shared: Running) -> None:
    made = shared.http.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "fine-tune"}).json()
    content = shared.home / "files" / made["id"]
    content.unlink()
    content.mkdir()
    assert shared.http.delete(f"/v1/files/{made['id']}").json()["deleted"]
    assert shared.http.get(f"/v1/files/{made['id']}").status_code == 404
    content.rmdir()
