"""Checkpoints become models: served by name, start models of new jobs, files to download."""

from __future__ import annotations

import openai
import pytest
from server_harness import KEY, Running, Start


@pytest.fixture
def trained(start: Start) -> tuple[Running, str]:
    """A job with checkpoints of versions 1 and 2, which goes on."""
    server = start(max_running=2)
    job = server.create_job(num_batches=3, checkpoint_every=1)
    for index in range(2):
        server.fill(job, index)
        server.wait(job, lambda p, index=index: p["inference_version"] == index + 1)
    return server, job


def promote(server: Running, job: str, version: int, **body: str):
    path = f"/v1/fine_tuning/jobs/{job}/checkpoints/ftckpt-{job}-{version}/promote"
    return server.http.post(path, json=body)


def test_a_promoted_checkpoint_is_served_and_starts_a_job(trained: tuple[Running, str]) -> None:
    server, job = trained
    made = promote(server, job, 1, name="first try")
    assert made.status_code == 200, made.text
    model = made.json()
    assert (model["name"], model["version"], model["fine_tuning_job_id"]) == ("first try", 1, job)
    assert promote(server, job, 1, name="first try").json()["id"] == model["id"]  # asked again
    taken = promote(server, job, 2, name="first try")
    assert (taken.status_code, taken.json()["detail"]) == (409, "model 'first try' exists already; give another name")

    assert model["id"] in [one["id"] for one in server.http.get("/v1/models").json()["data"]]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for name in (model["id"], "first try"):
        answer = server.http.post("/v1/chat/completions", json={"model": name, **body})
        assert answer.status_code == 200, answer.text

    server.fill(job, 2)  # the job goes on untouched
    versions = {one["version"]: one["fingerprint"] for one in server.wait_status(job, "succeeded")["versions"]}
    server.model = "first try"
    second = server.create_job()
    started = server.wait(second, lambda p: p["inference_version"] == 0)
    assert started["versions"][0]["fingerprint"] == versions[1]


def test_a_checkpoint_is_downloaded_whole_and_leaves_nothing(trained: tuple[Running, str]) -> None:
    server, job = trained
    answer = server.http.get(f"/v1/fine_tuning/jobs/{job}/checkpoints/ftckpt-{job}-2/download")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-disposition"] == f'attachment; filename="{job}-2.safetensors"'
    assert answer.text == server.progress(job)["versions"][2]["fingerprint"]
    assert list((server.home / "models").iterdir()) == []


def test_a_promoted_model_is_deleted_unless_a_job_needs_it(trained: tuple[Running, str]) -> None:
    server, job = trained
    model = promote(server, job, 1, name="first try").json()
    server.http.post(f"/v1/fine_tuning/jobs/{job}/cancel")
    body = {"model": "first try", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    server.model = "first try"
    user = server.create_job()
    with openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.ConflictError, match=f"start model of job {user}"):
            client.models.delete(model["id"])
        with pytest.raises(openai.ConflictError, match=f"that of job {user}, which keeps it"):
            client.models.delete(user)
        server.http.post(f"/v1/fine_tuning/jobs/{user}/cancel")
        assert client.models.delete("first try").deleted
        assert list(client.models.list()) == []
        with pytest.raises(openai.NotFoundError):
            client.models.delete(model["id"])
    assert list((server.home / "models").iterdir()) == []
    assert server.http.post("/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65, "a\nb"])
def test_a_bad_name_is_refused(trained: tuple[Running, str], name: str) -> None:
    server, job = trained
    refused = promote(server, job, 1, name=name)
    assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, ["body", "name"])
    assert promote(server, job, 7).status_code == 404


def test_damaged_weights_do_not_become_a_model(trained: tuple[Running, str]) -> None:
    server, job = trained
    state = server.home / "jobs" / job / "checkpoints" / "00000001" / "state.json"
    state.write_text(state.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    refused = promote(server, job, 1)
    assert refused.status_code == 409, refused.text
    assert "holds other weights" in refused.json()["detail"]
    assert list((server.home / "models").iterdir()) == []
